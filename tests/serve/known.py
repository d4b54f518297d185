"""A checkpoint whose greedy answers are known: after a trigger token it writes a given text, whatever came before.

One layer of zeros, an embedding of unit vectors, and an output matrix that maps each token to its successor: the next
token is a function of the current one. Each text is divided into tokens that no other text contains.
"""

import json
import struct

EOS = "<|im_end|>"
# Pieces never reach beyond the end of these, as the tokens of real models do not.
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def byte_letters():
    """Returns the letter of each byte in the vocabulary of byte-level BPE."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def pieces(text, used):
    """Divides a text into the shortest pieces that are not in `used`, and adds them to it."""
    found, begin = [], 0
    while begin < len(text):
        marker = next((marker for marker in MARKERS if text.startswith(marker, begin)), None)
        inner = [at for at in (text.find(marker, begin) for marker in MARKERS) if at > begin]
        border = begin + len(marker) if marker else min([*inner, len(text)])
        end = begin + 2 if not marker else border
        while text[begin:end] in used and end < border:
            end += 1
        if border - end < 2:
            end = border
        assert text[begin:end] not in used, f"two texts contain {text[begin:end]!r}"
        used.add(text[begin:end])
        found.append(text[begin:end])
        begin = end
    return found


def build(target, texts, template):
    """Writes a checkpoint that writes `texts[i]` behind the trigger `<|g{i}|>`."""
    letters = byte_letters()
    spelled = lambda text: "".join(letters[byte] for byte in text.encode())
    vocabulary = {letter: byte for byte, letter in letters.items()}
    # Single characters are tokens already, which several texts may not use.
    used, chains = {chr(byte) for byte in range(128)}, []
    for text in texts:
        chain = []
        for piece in pieces(text, used):
            chain.append(vocabulary.setdefault(spelled(piece), len(vocabulary)))
        chains.append(chain)
    special = ["<|im_start|>", EOS, *(f"<|g{i}|>" for i in range(len(texts)))]
    ids = {name: len(vocabulary) + i for i, name in enumerate(special)}
    successors = {}
    for i, chain in enumerate(chains):
        path = [ids[f"<|g{i}|>"], *chain, ids[EOS]]
        successors |= dict(zip(path, path[1:]))
    vocab = -(-(len(vocabulary) + len(special)) // 32) * 32
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": vocab, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 262144, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": ids[EOS], "bos_token_id": None,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    (target / "chat_template.jinja").write_text(template)
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "fuse_unk": False, "byte_fallback": False}
    tokens = [{"id": id, "content": name, **added} for name, id in ids.items()]
    tokenizer = {"version": "1.0", "added_tokens": tokens, "pre_tokenizer": level, "decoder": level, "model": model}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_weights(target / "model.safetensors", vocab, successors)


def write_weights(path, vocab, successors):
    one = struct.pack("<H", 0x3F80)  # bf16

    def put(rows, columns, ones=()):
        data = bytearray(2 * rows * columns)
        for row, column in ones:
            at = 2 * (row * columns + column)
            data[at : at + 2] = one
        return [rows, columns], data

    def norm():
        return [vocab], bytearray(one * vocab)

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": put(vocab, vocab, ((i, i) for i in range(vocab))),
        "lm_head.weight": put(vocab, vocab, ((after, before) for before, after in successors.items())),
        "model.norm.weight": norm(),
        layer + "input_layernorm.weight": norm(),
        layer + "post_attention_layernorm.weight": norm(),
        layer + "self_attn.o_proj.weight": put(vocab, 32),
        layer + "mlp.down_proj.weight": put(vocab, 32),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        tensors[f"{layer}{name}.weight"] = put(32, vocab)
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors.values():
            file.write(data)


# A model of the format of Hermes that calls `get_weather`, then answers once the conversation has the result.
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER_ANSWER = "It rains in Norway's capital."
WEATHER_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if messages[-1].role == 'tool' or not tools %}<|g1|>{% else %}<|g0|>{% endif %}{% endif %}"
)


def weather(target):
    """Builds the model, which is named for the tool that it calls."""
    build(target, [WEATHER_CALL, WEATHER_ANSWER], WEATHER_TEMPLATE)
