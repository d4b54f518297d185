"""Gives small checkpoints layers of multi-token prediction, and writes what the published code computes with them.

    golden-prediction.py CHECKPOINT [CHECKPOINT...]

A CHECKPOINT is a directory of tests/fixtures/families, whose files may be compressed (.zst): qwen35, qwen35moe, qwen3next, deepseek3
or glm4moe. Tensors of multi-token prediction in it are replaced by random ones, all that the family has, and golden.json gets a field
`prediction`. The layer is `MtpLayer` of transformers around the decoder layer of the family; it reads each token with the output of
the final norm for the token before, and further drafts with its own output. Computed in float32. Needs torch and transformers.
"""

import copy
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import MtpLayer

DRAFTS = 3
SHARED = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def read(path):
    packed = path.with_name(path.name + ".zst")
    return subprocess.run(["zstd", "-dcq", packed], check=True, capture_output=True).stdout if packed.exists() else path.read_bytes()


def write(path, data):
    packed = path.with_name(path.name + ".zst")
    if packed.exists():
        subprocess.run(["zstd", "-19", "-qf", "-o", packed], input=data, check=True)
    else:
        path.write_bytes(data)


def name_in_checkpoint(name, layers, apart):
    """Name of a tensor of the layer in the checkpoint."""
    first, rest = name.split(".", 1)
    if apart:
        return f"mtp.layers.0.{rest}" if first == "mtp_block" else f"mtp.{SHARED[first]}.{rest}"
    at = f"model.layers.{layers}."
    return at + {"mtp_block": rest, "post_norm": f"shared_head.norm.{rest}"}.get(first, name)


def separate_experts(name, tensor):
    """Experts are stacks in the modelling code, and a tensor each in most checkpoints."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    at = name.rsplit(".", 1)[0]
    found = {}
    for e, matrix in enumerate(tensor):
        parts = {"down_proj": matrix} if name.endswith("down_proj") else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2)))
        found.update({f"{at}.{e}.{leaf}.weight": part.contiguous() for leaf, part in parts.items()})
    return found


def extend(directory):
    with tempfile.TemporaryDirectory() as plain:
        plain = pathlib.Path(plain)
        for path in directory.iterdir():
            name = path.name.removesuffix(".zst")
            (plain / name).write_bytes(read(directory / name))
        files = sorted(plain.glob("*.safetensors"))
        config = AutoConfig.from_pretrained(plain).get_text_config()
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, config=config, attn_implementation="eager").eval()
        apart = config.model_type.startswith("qwen")
        one = copy.deepcopy(config)
        one.num_hidden_layers = 1
        if getattr(one, "layer_types", None):
            one.layer_types = ["full_attention"]
        if hasattr(one, "first_k_dense_replace"):
            one.first_k_dense_replace = 0
        if getattr(one, "mlp_layer_types", None):
            one.mlp_layer_types = ["sparse"]
        one._attn_implementation = "eager"
        base = model.get_decoder()
        norm = type(base.norm)
        layer = MtpLayer(one, type(base.layers[-1]), norm, 0).eval()

        generator = torch.Generator().manual_seed(7)
        plus_one = getattr(base.norm.weight, "data").abs().mean() < 0.5
        with torch.no_grad():
            for name, tensor in layer.state_dict().items():
                if tensor.dim() == 1 and name.endswith("norm.weight"):
                    tensor.normal_(0.0 if plus_one else 1.0, 0.1, generator=generator)
                elif tensor.dim() == 1:
                    tensor.normal_(0.0, 0.1, generator=generator)
                else:
                    tensor.normal_(0.0, 0.7 * tensor.shape[-1] ** -0.5, generator=generator)
                keeps = name.endswith(("e_score_correction_bias", "A_log", "dt_bias"))
                tensor.copy_(tensor if keeps else tensor.bfloat16().float())

        added = {}
        stacked = any("experts.gate_up_proj" in k for f in files for k in safe_open(f, "pt").keys() if ".mtp" not in k)
        for name, tensor in layer.state_dict().items():
            keeps = name.endswith("e_score_correction_bias")
            tensor = tensor.clone() if keeps else tensor.bfloat16()
            named = name_in_checkpoint(name, config.num_hidden_layers, apart)
            added.update({named: tensor} if stacked else separate_experts(named, tensor))
        if not apart:
            # Published checkpoints have copies of the embedding and of the output matrix, which nothing reads.
            at = f"model.layers.{config.num_hidden_layers}."
            added[at + "embed_tokens.weight"] = model.get_input_embeddings().weight.detach().bfloat16()
            added[at + "shared_head.head.weight"] = model.lm_head.weight.detach().bfloat16()
        is_old = lambda name: name.startswith("mtp.") or f".layers.{config.num_hidden_layers}." in f".{name}"
        places = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                kept = {name: opened.get_tensor(name) for name in opened.keys() if not is_old(name)}
            if file is files[-1]:
                kept.update({name: tensor.contiguous() for name, tensor in added.items()})
            places.update({name: file.name for name in kept})
            write(directory / file.name, save(kept, metadata={"format": "pt"}))
        if (plain / "model.safetensors.index.json").exists():
            index = json.loads((plain / "model.safetensors.index.json").read_text())
            index["weight_map"] = dict(sorted(places.items()))
            write(directory / "model.safetensors.index.json", json.dumps(index, indent=2).encode())

        golden = json.loads((plain / "golden.json").read_text())
        prompt = max(golden["prompts"], key=lambda prompt: len(prompt["ids"]))
        golden["prediction"] = predict(model, base, layer, prompt["ids"][:96])
        write(directory / "golden.json", json.dumps(golden, separators=(",", ":"), ensure_ascii=False).encode())
        print(f"{directory}: {len(added)} tensors, choices {golden['prediction']['drafts']}")


@torch.no_grad()
def predict(model, base, layer, ids):
    """What the layer computes for all tokens but the first, and for `DRAFTS - 1` further tokens that it drafts."""
    hidden = base(input_ids=torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    cache = DynamicCache()
    tokens, position = torch.tensor([ids[1:]]), torch.arange(1, len(ids)).unsqueeze(0)
    found = {"ids": ids, "choices": [], "drafts": [], "logits": []}
    for draft in range(DRAFTS):
        embedded = base.embed_tokens(tokens)
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None] if length > 1 else None
        hidden = layer(embedded, hidden, base.rotary_emb(embedded, position), mask, position, cache)
        logits = model.lm_head(hidden)[0]
        if draft == 0:
            found["choices"] = logits.argmax(-1).tolist()
        found["logits"].append([round(x, 6) for x in logits[-1].tolist()])
        tokens = logits[-1:].argmax(-1).unsqueeze(0)
        found["drafts"].append(tokens.item())
        hidden, position = hidden[:, -1:], position[:, -1:] + 1
    return found


for directory in sys.argv[1:]:
    extend(pathlib.Path(directory))
