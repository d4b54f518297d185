#!/usr/bin/env python3
"""Makes tests/fixtures/adapters: LoRA adapters in the form in which peft saves them, with what transformers and peft
compute from them.

Every case is a folder with adapter_config.json and adapter_model.safetensors, as PeftModel.save_pretrained wrote them,
and golden.json. The base model is the checkpoint of the unpacked fixtures that golden.json names. Nothing is trained:
the factors A and B, magnitudes, biases and trained copies of whole modules are random numbers, scaled so that each
changes its weight by about a fifth of the weight's norm. Seeds count up from 1 until every greedy choice is clear (see
MARGIN) and none is the placeholder of an image or a sound.

golden.json holds, for each prompt, the ids, 24 greedy ids, the smallest distance between the first and the second
logit on the way (`min_margin`), and the logits at the last position of the prompt (`last_logits`, 7 digits). They are
computed in float32 on the CPU, with the adapter loaded from the files and not merged. `merged` compares these logits
with those of the model that merge_and_unload returns, or says why peft does not merge; where embeddings are tied, a
merged model may be another model. `base_logits_changed_by` is the largest difference from the logits of the base
model.

Three things are changed in what peft wrote: base_model_name_or_path is the name of the fixture, not a path; lists that
peft keeps as sets, so in any order, are sorted; and some cases set fields that peft resolves before it saves (see
`edit`). The cases whose names end in -modules hold one pair of factors for each projection of each expert, as peft
saved them while transformers kept experts as modules (before 5.0). They are written tensor by tensor; peft fuses them
when it loads them. The cases whose names end in -swapped have the factors of experts in each other's place, as
versions of peft and transformers that disagreed about the layout of expert weights saved them; the change of the
weights, and so golden.json, is computed from the same factors in today's places.

    python3 -m venv venv && venv/bin/pip install -r tests/reference/adapters.txt
    scripts/gpu-check.sh --unpack tests/fixtures unpacked
    venv/bin/python tests/reference/make_adapters.py unpacked tests/fixtures/adapters [CASE...]

The same machine writes the same bytes again. Another one may differ in the last digits of the logits.
"""

import json
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.lora.layer import LoraLayer, ParamWrapper  # noqa: E402
from peft.utils.other import ModulesToSaveWrapper  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from transformers.utils import logging  # noqa: E402

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPTS = ["Once upon a time", "def main():\n    print(", "Привет, 你好 😀"]
GREEDY = 24
MARGIN = 0.003
# The norm of a change, as a part of the norm of what it changes.
CHANGE = 0.2
# How far apart two float32 computations of one model may be.
TOLERANCE = 1e-4
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass
class Case:
    name: str
    base: str
    dtype: str
    config: dict
    # Fields of adapter_config.json that are set after saving.
    edit: dict = field(default_factory=dict)
    # False leaves the unchanged weights of targeted embeddings out of the file; "auto" is what peft does by itself.
    save_embeddings: str | bool = "auto"
    expert_modules: bool = False
    swapped: bool = False
    mergeable: bool = True
    note: str = ""


CASES = [
    Case("rslora", "llama-gqa", "float16", {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": LINEARS}),
    Case(
        "patterns",
        "llama-gqa",
        "float32",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "model.layers.1.self_attn.o_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
            # peft takes the first key that fits, and sorts the keys when it saves.
            "rank_pattern": {
                "^model.layers.0.*v_proj": 3,
                "down_proj": 7,
                "layers.2.self_attn.q_proj": 5,
                "q_proj": 2,
            },
            "alpha_pattern": {
                "^model.layers.0.*v_proj": 6,
                "layers\\.[02]\\.mlp\\.down_proj": 10.5,
                "o_proj": 3,
                "proj": 1000,
                "self_attn.o_proj": 48,
            },
        },
        note="layers_to_transform does not hold for a module that target_modules names in full (layer 1, o_proj); "
        "the alpha_pattern proj fits no module, and self_attn.o_proj comes after o_proj",
    ),
    Case(
        "regex",
        "llama-gqa",
        "bfloat16",
        {
            "r": 5,
            "lora_alpha": 10,
            "target_modules": r"^(?!.*lm_head).*\.(0|2)\.self_attn\.(q|v)_proj$|model\.layers\.1\.mlp\..*_proj",
            "exclude_modules": r".*\.mlp\.up_proj",
            "rank_pattern": {r".*\.1\.mlp\.(gate|down)_proj": 7, r"layers\.\d+\.self_attn\.v_proj": 3},
            "alpha_pattern": {r"layers\.\d+\.mlp\.(gate|up)_proj": 4},
        },
    ),
    Case(
        "lora-bias",
        "llama-gqa",
        "float32",
        {
            "r": 4,
            "lora_alpha": 6,
            "lora_bias": True,
            "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
            "layers_to_transform": 1,
        },
        mergeable=False,
    ),
    Case(
        "lora-bias-qwen2",
        "qwen2",
        "bfloat16",
        {"r": 4, "lora_alpha": 6, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    Case(
        "base-bias",
        "qwen2",
        "float32",
        {"r": 2, "lora_alpha": 4, "bias": "lora_only", "target_modules": ["k_proj", "v_proj"]},
        note="the biases of the base model are trained and saved under base_layer.bias, in place of the old ones",
    ),
    Case(
        "embeddings",
        "llama-gqa",
        "bfloat16",
        {"r": 6, "lora_alpha": 12, "target_modules": ["embed_tokens", "lm_head", "q_proj", "v_proj"]},
        note="peft saves the unchanged weights of targeted embeddings as base_layer.weight",
    ),
    Case(
        "tied-embed",
        "llama3-rope-tied",
        "float32",
        {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]},
        save_embeddings=False,
        mergeable=False,
        note="the change of embed_tokens does not reach lm_head, though their weights are tied",
    ),
    Case(
        "tied-both",
        "qwen2",
        "bfloat16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        mergeable=False,
        note="embed_tokens and lm_head have factors of their own",
    ),
    Case(
        "tied-ensured",
        "qwen2",
        "float16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
        save_embeddings=False,
        mergeable=False,
        note="the factors of lm_head are those of embed_tokens, transposed, and are saved too",
    ),
    Case(
        "save-embeddings",
        "llama-gqa",
        "bfloat16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    Case(
        "tied-save-head",
        "llama3-rope-tied",
        "float16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["gate_proj"], "modules_to_save": ["lm_head"]},
        note="embed_tokens keeps the weights of the base model",
    ),
    Case(
        "tied-save-embed",
        "qwen2",
        "bfloat16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        note="lm_head keeps the weights of the base model",
    ),
    Case(
        "tied-save-ensured",
        "qwen2",
        "bfloat16",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        note="lm_head is saved too, equal to embed_tokens",
    ),
    Case(
        "phi3-fused",
        "phi3",
        "float16",
        {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]},
    ),
    Case(
        "qwen3moe-experts",
        "qwen3moe",
        "bfloat16",
        {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS},
        note="experts.base_layer is gate_up_proj and experts is down_proj",
    ),
    Case(
        "qwen3moe-down",
        "qwen3moe",
        "float16",
        {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.gate.weight"],
        },
        note="experts is down_proj, and no base_layer stands between; gate is the router",
    ),
    Case(
        "qwen3moe-gate-up",
        "qwen3moe",
        "bfloat16",
        {"r": 2, "lora_alpha": 4, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
        note="experts is gate_up_proj, under the same name as down_proj in qwen3moe-down",
    ),
    Case(
        "mixtral-experts",
        "mixtral",
        "float32",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": EXPERTS + ["gate.weight"],
            "rank_pattern": {"experts.gate_up_proj": 3},
            "alpha_pattern": {"experts.gate_up_proj": 12},
        },
        note="gate is the router",
    ),
    Case(
        "mixtral-modules",
        "mixtral",
        "bfloat16",
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "w1", "w2", "w3", "gate"]},
        expert_modules=True,
    ),
    Case(
        "qwen3moe-modules",
        "qwen3moe",
        "float16",
        {"r": 2, "lora_alpha": 3, "target_modules": ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        expert_modules=True,
    ),
    Case(
        "gptoss-experts",
        "gptoss-bf16",
        "bfloat16",
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": EXPERTS, "use_rslora": True},
        note="the rows of gate_up_proj's B alternate between gate and up, as in the base model",
    ),
    Case(
        "mixtral-swapped",
        "mixtral",
        "float16",
        {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj"], "target_parameters": EXPERTS},
        edit={"peft_version": "0.18.1"},
        swapped=True,
        note="as peft before 0.19 saved it: A has the width of the expert's output, and B the height of its input",
    ),
    Case(
        "gptoss-swapped",
        "gptoss-bf16",
        "float32",
        {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "target_parameters": EXPERTS},
        swapped=True,
        note="as peft from 0.19 on saves it with transformers before 5.0: A has the width of the expert's output, and "
        "B the height of its input",
    ),
    Case(
        "fan-in-fan-out",
        "llama-gqa",
        "float32",
        {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "down_proj"], "fan_in_fan_out": True},
        edit={"fan_in_fan_out": True},
        note="peft ignores the field for linear layers, and saves it as false",
    ),
    Case(
        "all-linear",
        "qwen2",
        "float16",
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
        edit={"target_modules": "all-linear"},
        note="peft saves the names that it found, and reads either; lm_head is not one of them",
    ),
    Case(
        "all-linear-exclude",
        "qwen3",
        "bfloat16",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": "all-linear",
            "exclude_modules": ["o_proj", "layers.1.mlp.up_proj"],
        },
        note="peft saves the names of all linear layers, with the excluded ones",
    ),
    Case(
        "dora-rslora",
        "llama-gqa",
        "float32",
        {"r": 5, "lora_alpha": 3, "use_dora": True, "use_rslora": True, "target_modules": LINEARS},
    ),
    Case(
        "dora-embeddings",
        "llama-gqa",
        "float32",
        {"r": 5, "lora_alpha": 10, "use_dora": True, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        save_embeddings=False,
        note="the magnitudes of embed_tokens belong to the columns of the embedding, not to its rows",
    ),
    Case(
        "latent-all-linear",
        "deepseek3",
        "float16",
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
        edit={"target_modules": "all-linear"},
        note="latent attention: the projection to keys and values, kv_b_proj, is one of the linear layers",
    ),
    Case(
        "latent-dora",
        "glm4flash",
        "float32",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_dora": True,
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        },
        note="the magnitudes of kv_b_proj belong to the numbers of keys and values of the heads",
    ),
    Case(
        "wrapper-all-linear",
        "gemma4-e",
        "bfloat16",
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
        edit={"target_modules": "all-linear"},
        note="the linear layers of the towers are changed, too, which text does not use",
    ),
]


def load_base(path):
    """The base model as the goldens use it: weights in float32, every part in its plainest implementation."""
    # Adapters of models for images or sound name their modules inside the wrapper.
    wrapper = json.loads((path / "config.json").read_text())["architectures"][0].endswith("ForConditionalGeneration")
    auto = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM
    return auto.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def draw(random, like):
    return torch.randn(like.shape, generator=random)


def fill(model, seed):
    """Gives every weight of the adapter a random value."""
    random = torch.Generator().manual_seed(seed)
    config = model.peft_config["default"]
    seen = set()
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            weight = module.modules_to_save["default"].weight
            if id(weight) not in seen:
                seen.add(id(weight))
                weight += draw(random, weight) * CHANGE * weight.std()
        elif isinstance(module, LoraLayer):
            if "default" in module.lora_embedding_A:
                a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
            else:
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            base = module.get_param() if isinstance(module, ParamWrapper) else module.get_base_layer().weight
            a.copy_(draw(random, a))
            b.copy_(draw(random, b))
            b *= CHANGE * base.norm() / module.get_delta_weight("default").norm()
            if config.lora_bias:
                bias = module.lora_B["default"].bias
                bias.copy_(draw(random, bias) * CHANGE / module.scaling["default"])
            if config.bias == "lora_only":
                bias = module.get_base_layer().bias
                bias += draw(random, bias) * CHANGE
            if config.use_dora:
                magnitude = module.lora_magnitude_vector["default"].weight
                magnitude *= 1 + CHANGE * draw(random, magnitude)


def expert_modules(base, config, seed):
    """The tensors of an adapter for the modules that the names of the checkpoint's tensors speak of."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for path in sorted(base.glob("*.safetensors")):
        weights.update(load_file(path))
    tensors = {}
    for name, weight in sorted(weights.items()):
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in config.target_modules:
            a = torch.randn((config.r, weight.shape[1]), generator=random)
            b = torch.randn((weight.shape[0], config.r), generator=random)
            b *= CHANGE * weight.float().norm() / (config.lora_alpha / config.r * b @ a).norm()
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    return tensors


def swap(tensors, experts):
    """Experts' factors in the other layout: the change of every expert's weight, B times A, stays the same."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for name_a in [name for name in tensors if ".experts." in name and ".lora_A." in name]:
        name_b = name_a.replace(".lora_A.", ".lora_B.")
        a, b = tensors[name_a], tensors[name_b]
        # Rows of A count ranks within experts, and columns of B count experts within ranks.
        rank = a.shape[0] // experts
        tensors[name_a] = b.reshape(-1, rank, experts).permute(2, 1, 0).reshape(rank * experts, -1).contiguous()
        tensors[name_b] = a.reshape(experts, rank, -1).permute(2, 1, 0).reshape(-1, rank * experts).contiguous()
    return tensors


def save(case, base, seed, folder):
    """Writes adapter_config.json and adapter_model.safetensors."""
    dtype = getattr(torch, case.dtype)
    config = LoraConfig(task_type="CAUSAL_LM", **case.config)
    if case.expert_modules:
        tensors = expert_modules(base, config, seed)
        config.inference_mode = True
        config.save_pretrained(folder)
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        model = get_peft_model(load_base(base), config)
        fill(model, seed)
        model.to(dtype).save_pretrained(folder, save_embedding_layers=case.save_embeddings)
    saved = json.loads((folder / CONFIG).read_text())
    # The order of dicts is kept: it says which pattern comes first.
    for key in ("target_modules", "exclude_modules", "target_parameters"):
        if isinstance(saved[key], list):
            saved[key].sort()
    saved.update(case.edit, base_model_name_or_path=case.base)
    (folder / CONFIG).write_text(json.dumps(saved, indent=2) + "\n")


def last_logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def greedy(model, ids):
    """The greedy ids and the smallest distance between the first and the second logit."""
    ids, margin = list(ids), float("inf")
    for _ in range(GREEDY):
        values, best = last_logits(model, ids).topk(2)
        margin = min(margin, float(values[0] - values[1]))
        ids.append(int(best[0]))
    return ids[-GREEDY:], margin


def digits(value):
    return float(f"{value:.7g}")


def golden(case, base, seed, folder):
    """What the saved adapter computes, or None where a greedy choice is not clear."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    known = {p["text"]: p for p in json.loads((base / "golden.json").read_text())["prompts"]}
    plain = load_base(base)
    # A wrapper embeds the tokens that stand for images and sounds in another way than its language model.
    placeholders = {value for key, value in json.loads((base / "config.json").read_text()).items()
                    if key in ("image_token_id", "audio_token_id", "video_token_id")}  # fmt: skip
    model = PeftModel.from_pretrained(load_base(base), folder).eval()
    prompts, logits, changed = [], [], 0.0
    for text in PROMPTS:
        ids = tokenizer.encode(text).ids
        greedy_ids, margin = greedy(model, ids)
        if margin <= MARGIN or placeholders & {*ids, *greedy_ids}:
            return None
        logits.append(last_logits(model, ids))
        without = last_logits(plain, ids)
        if text in known:
            expected = torch.tensor(known[text]["prompt_last_logits"]["full"])
            assert known[text]["ids"] == ids and (without - expected).abs().max() < TOLERANCE, text
        changed = max(changed, float((logits[-1] - without).abs().max()))
        prompts.append(
            {
                "text": text,
                "ids": ids,
                "greedy_ids": greedy_ids,
                "min_margin": digits(margin),
                "last_logits": [digits(value) for value in logits[-1].tolist()],
            }
        )
    try:
        merged_model = PeftModel.from_pretrained(load_base(base), folder).merge_and_unload().eval()
        pairs = [(last_logits(merged_model, p["ids"]), values) for p, values in zip(prompts, logits)]
        difference = max(float((one - other).abs().max()) for one, other in pairs)
        assert (difference < TOLERANCE) == case.mergeable, (case.name, difference)
        merged = {"max_abs_logit_diff": digits(difference)}
    except RuntimeError as error:
        assert not case.mergeable, error
        merged = {"max_abs_logit_diff": None, "error": str(error)}
    packages = ["transformers", "torch", "peft", "tokenizers", "safetensors"]
    return {
        "format": "iec-adapter-golden-1",
        "base": case.base,
        **({"note": case.note} if case.note else {}),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "compute": "float32, CPU, eager attention, adapter not merged",
        "seed": seed,
        "prompts": prompts,
        "merged": merged,
        "base_logits_changed_by": digits(changed),
    }


def make(case, fixtures, out):
    folder = out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    base = fixtures / case.base
    result, seed = None, 0
    while result is None:
        seed += 1
        with tempfile.TemporaryDirectory() as temporary:
            temporary = Path(temporary)
            save(case, base, seed, temporary)
            result = golden(case, base, seed, temporary)
            if case.swapped:
                experts = json.loads((base / "config.json").read_text())["num_local_experts"]
                save_file(swap(load_file(temporary / WEIGHTS), experts), temporary / WEIGHTS, metadata={"format": "pt"})
            for name in (CONFIG, WEIGHTS):
                (folder / name).write_bytes((temporary / name).read_bytes())
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (folder / "golden.json").write_text(text + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    margin = min(p["min_margin"] for p in result["prompts"])
    print(
        f"{case.name}: seed {seed}, {size} bytes, margin {margin:.4f}, changed by "
        f"{result['base_logits_changed_by']:.2f}, merged {result['merged']['max_abs_logit_diff']}",
        flush=True,
    )


def main(fixtures, out, *names):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for case in (case for case in CASES if not names or case.name in names):
        make(case, Path(fixtures), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
