#!/usr/bin/env python3
"""Makes small random checkpoints of families in tests/fixtures/families, with what transformers computes from them.

A checkpoint has the files, tensor names and configuration of the published ones, with a tiny vision tower or layers
that predict further tokens where these have them. Weights are scaled so that logits spread (standard deviation 2 to 3)
and every feature matters: for each feature in `without`, the greedy ids of some prompt change when it is taken away.
Seeds count up from 1 until every greedy choice is clear (see MARGIN), and in bfloat16 those that are very clear are the
same (see CLEAR).

golden.json holds, for each prompt, the ids, 32 greedy ids, the smallest distance between the first and the second logit
on the way (`min_margin`), all logits after the prompt and the five largest at each step; the negative log-likelihoods of
one window of 256 tokens (`perplexity`); and awkward texts with their tokens. Everything is computed from the files, in
float32 on the CPU with eager attention. Greedy ids are computed with a KV cache, without one, and with SDPA attention,
and must agree.

    python3 -m venv venv && venv/bin/pip install -r tests/reference/families.txt
    venv/bin/python tests/reference/make_families.py tests/fixtures/families

The program `zstd` compresses the larger files. The same machine writes the same bytes again. Another one may differ in
the last digits of the logits.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM  # noqa: E402
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration  # noqa: E402
from transformers.utils import logging  # noqa: E402

PROMPTS = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light",
    "Q: What is the capital of France?\nA:",
]
AWKWARD = [
    "", " ", "Hello, world!", "  leading and trailing  ", "tabs\tand\nnewlines\r\n\r\n  mixed \t ",
    "naïve café — “quotes” …", "Привет, мир! 你好,世界。", "😀👩\u200d👩\u200d👧\u200d👦🇫🇷 ok",
    "1234567890 3.14159 1,000,000 ½", "def f(x):\n    return x**2  # ok\n", "https://example.org/a_b?c=d&e=f#g",
    "I'm you're WE'VE she'll they'd 'S", "ALLCAPS camelCase snake_case kebab-case", "a" * 70,
    "\xa0\u2003\u200bzero\u200dwidth", "e\u0301 vs é (combining)", "مرحبا بالعالم नमस्ते 한국어", "\x00\x01\x7f control",
    "\n\n\n\n    \n", "$€£¥ ±×÷ ≤≥≠ ∑∫√ <html>&amp;</html>",
]  # fmt: skip
GREEDY, MARGIN, WINDOW, VOCAB = 32, 0.004, 256, 512
# Distance of two logits that bfloat16 must not exchange. Where two experts are almost equally likely, it may.
CLEAR = 0.25
ROOT = Path(__file__).resolve().parents[2]
# Split rule of o200k: runs of letters by case with contractions, up to three digits, other characters, spaces.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_pairs(specials):
    """Trains a byte-level tokenizer of VOCAB tokens, the last of which are special."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(O200K), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(specials), initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train([str(ROOT / "tests/text/tinystories_valid_30k.txt")], trainer)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def minimax():
    """MiniMax-M2: sigmoid routing with a bias, q/k norms over all heads, half of each head rotated."""
    config = MiniMaxM2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, num_local_experts=8, num_experts_per_tok=3,
        bos_token_id=509, eos_token_id=511, rotary_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
    )  # fmt: skip
    published = {
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1, 1, 1],
        "bos_token_id": None, "eos_token_id": None, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 48, "layernorm_full_attention_beta": 1.0,
        "max_position_embeddings": 512, "mlp_intermediate_size": 96, "model_type": "minimax_m2",
        "mtp_transformer_layers": 1, "num_attention_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "num_local_experts": 8, "num_mtp_modules": 1, "output_router_logits": False,
        "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 16,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": VOCAB,
    }  # fmt: skip

    def further(tensors):
        """Adds a layer that predicts a further token, as DeepSeek names its tensors."""
        last = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if ".layers.2." in n}
        random = torch.Generator().manual_seed(7)
        draw = lambda *shape: (torch.randn(shape, generator=random) / 8).bfloat16()  # noqa: E731
        vectors = {f"model.layers.3.{name}.weight": draw(64) for name in ("enorm", "hnorm", "shared_head.norm")}
        return last | vectors | {"model.layers.3.eh_proj.weight": draw(64, 128)}

    return {
        "class": MiniMaxM2ForCausalLM,
        "shape": config,
        "config": published,
        "tokenizer": byte_pairs(["]~!b[", "]~b]", "[e~["]),
        "tokens": {"bos_token": "]~!b[", "eos_token": "[e~["},
        "generation": {"bos_token_id": 509, "eos_token_id": 511},
        "float32": ("block_sparse_moe.gate.weight", "e_score_correction_bias"),
        "turned": False,
        "further": further,
        "without": {
            "bias": lambda model: [layer.mlp.e_score_correction_bias.zero_() for layer in model.model.layers],
            "norm": lambda model: [layer.self_attn.q_norm.weight.fill_(1) for layer in model.model.layers],
            "rotation": lambda model: model.model.rotary_emb.inv_freq.zero_(),
            "theta": lambda model: model.model.rotary_emb.inv_freq[1:].mul_(2),
        },
    }


def qwen3vlmoe():
    """Qwen3-VL-MoE: a vision-language wrapper; stacks of experts are transposed, gate before up."""
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 497, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 499, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 112, "max_position_embeddings": 512, "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 48, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": VOCAB,
    }  # fmt: skip
    vision = {
        "deepstack_visual_indexes": [0], "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 16,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 24, "model_type": "qwen3_vl_moe",
        "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 64, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    published = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 3, "model_type": "qwen3_vl_moe",
        "text_config": text, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
        "video_token_id": 4, "vision_config": vision, "vision_end_token_id": 6, "vision_start_token_id": 5,
    }  # fmt: skip
    return {
        "class": Qwen3VLMoeForConditionalGeneration,
        "shape": Qwen3VLMoeConfig.from_dict(json.loads(json.dumps(published))),
        "config": published,
        "tokenizer": decompressed(ROOT / "tests/fixtures/families/qwen3vl/tokenizer.json.zst"),
        "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "generation": {"bos_token_id": 497, "eos_token_id": 499},
        "float32": (),
        "turned": True,
        "further": lambda tensors: {},
        "without": {
            "norm": lambda model: [layer.self_attn.k_norm.weight.fill_(1) for layer in layers(model)],
            "theta": lambda model: model.model.language_model.rotary_emb.inv_freq[1:].mul_(2),
            "experts": lambda model: [layer.mlp.gate.weight.zero_() for layer in layers(model)],
        },
    }


def decompressed(path):
    text = subprocess.run(["zstd", "-dc", str(path)], capture_output=True, check=True).stdout
    return Tokenizer.from_str(text.decode())


def layers(model):
    return getattr(model.model, "language_model", model.model).layers


def fill(model, seed):
    """Gives every weight a random value of a size that keeps the signal: about one over the root of its inputs."""
    random = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("norm.weight") or ".norm" in name and name.endswith(".weight"):
            tensor.copy_(torch.rand(tensor.shape, generator=random) + 0.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.5)
        elif tensor.dim() < 2:
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.1)
        else:
            inputs = 16 if "embed_tokens" in name else tensor.shape[-1]
            gain = 2.5 if name.endswith("lm_head.weight") else 1.6
            tensor.copy_(torch.randn(tensor.shape, generator=random) * gain / inputs**0.5)


def write(family, model, folder):
    """Writes the checkpoint as it is published: bfloat16 but for some tensors, with those that no text needs."""
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = {}
        for path in sorted(Path(saved).glob("*.safetensors")):
            tensors.update(load_file(path))
    wide = lambda name: name.endswith(family["float32"]) if family["float32"] else False  # noqa: E731
    tensors = {n: t.float() if wide(n) else t.bfloat16() for n, t in sorted(tensors.items())}
    # transformers turns stacks of experts when it reads them, but not when it saves them.
    turned = lambda name: family["turned"] and ".mlp.experts." in name  # noqa: E731
    tensors = {n: t.transpose(1, 2) if turned(n) else t for n, t in tensors.items()}
    tensors |= family["further"](tensors)
    save_file({n: t.contiguous() for n, t in sorted(tensors.items())}, folder / "model.safetensors", {"format": "pt"})
    files = {
        "config.json": family["config"],
        "generation_config.json": family["generation"] | {"transformers_version": version("transformers")},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **family["tokens"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    family["tokenizer"].save(str(folder / "tokenizer.json"))


def load(family, folder, attention, dtype=torch.float32):
    return family["class"].from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    ).eval()


def greedy(model, ids, cached):
    """Returns the greedy ids and the logits at each step."""
    found, rows, cache, feed = [], [], None, list(ids)
    for _ in range(GREEDY):
        out = model(input_ids=torch.tensor([feed]), past_key_values=cache, use_cache=cached)
        rows.append(out.logits[0, -1])
        found.append(int(rows[-1].argmax()))
        cache, feed = (out.past_key_values, found[-1:]) if cached else (None, list(ids) + found)
    return found, rows


def is_robust(model, found):
    """Returns true if the model, which is in bfloat16, chooses the same ids where float32 is sure."""
    ids, said = found["ids"], found["greedy_ids"]
    rows = model(input_ids=torch.tensor([ids + said[:-1]])).logits[0, len(ids) - 1 :]
    sure = [step["top5"][0][1] - step["top5"][1][1] > CLEAR for step in found["steps"]]
    return all(int(row.argmax()) == i for row, i, is_sure in zip(rows, said, sure) if is_sure)


def digits(number, count=9):
    return float(f"{float(number):.{count}g}")


def prompt(model, tokenizer, text, end):
    ids = tokenizer.encode(text).ids
    found, rows = greedy(model, ids, True)
    plain, again = greedy(model, ids, False)
    assert found == plain, text
    steps = [row.topk(5) for row in rows]
    until = found[: found.index(end) + 1] if end in found else found
    result = {
        "text": text, "ids": ids, "greedy_ids": found, "greedy_text": tokenizer.decode(found),
        "generate_ids_until_eos": until,
        "min_margin": digits(min(step.values[0] - step.values[1] for step in steps)),
        "prompt_last_logits": {"full": [digits(x) for x in rows[0]]},
        "steps": [{"top5": [[int(i), digits(v)] for v, i in zip(s.values, s.indices)]} for s in steps],
    }  # fmt: skip
    return result, max(float((a - b).abs().max()) for a, b in zip(rows, again))


def perplexity(model, tokenizer):
    text = (ROOT / "tests/text/heldback_sherlock_40k.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:WINDOW]
    chances = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    losses = -chances.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    mean = losses.double().mean()
    return {
        "rule": "one window; ids as given; mean over positions 1..n-1 of -ln p(id[i] | id[<i])", "ids": ids,
        "n": len(ids) - 1, "nll_mean": digits(mean), "ppl": digits(mean.exp()),
        "token_nll": [digits(x) for x in losses],
    }  # fmt: skip


def tokens(tokenizer, text):
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    return {
        "text": text, "ids": whole.ids, "ids_no_special": plain.ids, "tokens": whole.tokens,
        "decoded": tokenizer.decode(whole.ids, skip_special_tokens=False),
        "decoded_skip_special": tokenizer.decode(whole.ids, skip_special_tokens=True),
    }  # fmt: skip


def golden(name, family, folder):
    """Computes golden.json, or returns the reason why this seed will not do."""
    model, tokenizer, end = load(family, folder, "eager"), family["tokenizer"], family["generation"]["eos_token_id"]
    found = [prompt(model, tokenizer, text, end) for text in PROMPTS]
    prompts, noise = [p for p, _ in found], max(n for _, n in found)
    margin = min(p["min_margin"] for p in prompts)
    if margin < MARGIN:
        return f"margin {margin}"
    rounded = load(family, folder, "eager", torch.bfloat16)
    if not all(is_robust(rounded, p) for p in prompts):
        return "bfloat16 exchanges clear choices"
    sdpa = load(family, folder, "sdpa")
    same = all(greedy(sdpa, p["ids"], True)[0] == p["greedy_ids"] for p in prompts)
    for feature, take_away in family["without"].items():
        other = load(family, folder, "eager")
        take_away(other)
        if all(greedy(other, p["ids"], True)[0] == p["greedy_ids"] for p in prompts):
            return f"{feature} changes nothing"
    spread = torch.tensor(prompts[0]["prompt_last_logits"]["full"]).std()
    print(f"{name}: margin {margin}, spread of logits {spread:.2f}, cache noise {noise:.1e}, sdpa agrees: {same}")
    packages = ["transformers", "torch", "tokenizers", "safetensors"]
    return {
        "format": "iec-golden-1", "model": name,
        "compute": "float32 (weights upcast from the stored dtype), CPU, eager attention",
        "versions": {p: version(p) for p in packages} | {"python": platform.python_version()}, "vocab_size": VOCAB,
        "prompts": prompts, "min_margin": margin, "cache_vs_nocache_max_abs_logit_diff": digits(noise),
        "perplexity": perplexity(model, tokenizer), "tokenization": [tokens(tokenizer, text) for text in AWKWARD],
        "sdpa_attention_same_greedy_ids": same,
    }  # fmt: skip


def make(name, family, out):
    for seed in range(1, 200):
        model = family["class"](family["shape"])
        fill(model, seed)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write(family, model, folder)
            found = golden(name, family, folder)
            if isinstance(found, str):
                print(f"{name}, seed {seed}: {found}")
                continue
            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            (folder / "golden.json").write_text(text)
            target = out / name
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if path.name in ("golden.json", "model.safetensors", "tokenizer.json"):
                    to = target / (path.name + ".zst")
                    subprocess.run(["zstd", "-q", "-f", "-19", str(path), "-o", str(to)], check=True)
                else:
                    (target / path.name).write_bytes(path.read_bytes())
        return
    raise SystemExit(f"{name}: no seed gives clear choices")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name, family in [("minimaxm2", minimax), ("qwen3vlmoe", qwen3vlmoe)]:
        make(name, family(), Path(sys.argv[1]))
