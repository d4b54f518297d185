"""Trains a small model with gated delta nets, to measure what quantization costs such a model.

    train-hybrid.py --tokenizer DIR --held-back FILE [--held-back FILE...] --out DIR [--minutes N] TEXT...

The model has the form of Qwen3.5: six gated delta nets and two layers with attention, 9 million parameters, and a layer of
multi-token prediction, which learns beside it. The tokenizer is that of DIR. Paragraphs that share a run of eight words with a
held-back text are left out. Needs torch and transformers; their modelling code is what is trained. Runs on the CPU, with a fixed
seed; the result depends on how many steps fit into the minutes.
"""

import argparse
import json
import math
import pathlib
import random
import re
import shutil
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3_5TextConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

CHUNK = 64


def delta_rule(query, key, value, g, beta, **_):
    """The gated delta rule in chunks, as `torch_chunk_gated_delta_rule`, with a triangular solve in place of its loop over rows."""
    heads, groups = value.shape[2], value.shape[2] // key.shape[2]
    query, key = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(groups, dim=2) for x in (query, key))
    batch, length = query.shape[:2]

    def split(x):
        return x.transpose(1, 2).reshape(batch, heads, length // CHUNK, CHUNK, -1)

    query, key, value = split(query) * query.shape[-1] ** -0.5, split(key), split(value)
    beta, decay = (x.transpose(1, 2).reshape(batch, heads, length // CHUNK, CHUNK) for x in (beta, g))
    decay = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -math.inf).exp()
    mixed = (beta.unsqueeze(-1) * (key @ key.transpose(-1, -2)) * between).tril(-1)
    right = torch.cat([beta.unsqueeze(-1) * value, (beta * decay.exp()).unsqueeze(-1) * key], -1)
    solved = torch.linalg.solve_triangular(mixed + torch.eye(CHUNK), right, upper=False, unitriangular=True)
    added, recalled = solved.split([value.shape[-1], key.shape[-1]], -1)
    scores = (query @ key.transpose(-1, -2)) * between
    state, out = torch.zeros(batch, heads, key.shape[-1], value.shape[-1]), []
    for i in range(length // CHUNK):
        rows = added[:, :, i] - recalled[:, :, i] @ state
        out.append((query[:, :, i] * decay[:, :, i].exp().unsqueeze(-1)) @ state + scores[:, :, i] @ rows)
        last = decay[:, :, i, -1:]
        state = state * last.exp().unsqueeze(-1) + (key[:, :, i] * (last - decay[:, :, i]).exp().unsqueeze(-1)).transpose(-1, -2) @ rows
    return torch.cat(out, 2).transpose(1, 2), None


def check_delta_rule():
    """Compares it with the published form."""
    shapes = [(2, 128, 2, 32), (2, 128, 2, 32), (2, 128, 4, 32)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    g, beta = -F.softplus(torch.randn(2, 128, 4)), torch.rand(2, 128, 4)
    ours = delta_rule(q, k, v, g, beta)[0]
    theirs = qwen.torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    assert (ours - theirs).abs().max() < 1e-4, (ours - theirs).abs().max()


def runs_of_words(text):
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


def paragraphs(path, held_back):
    text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
    if match := re.search(r"\*\*\* ?START OF.*?\*\*\*(.*?)\*\*\* ?END OF", text, re.S):
        text = match[1]
    for paragraph in re.split(r"\n\s*\n", text):
        if path.suffix != ".py":
            paragraph = " ".join(paragraph.split())
        if paragraph and not (runs_of_words(paragraph) & held_back):
            yield paragraph


class Trained(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.main = qwen.Qwen3_5ForCausalLM(config)
        predicted = Qwen3_5TextConfig(**{**config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1})
        predicted._attn_implementation = "sdpa"
        self.mtp = MtpLayer(predicted, qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm, 0)
        for module in self.mtp.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=config.initializer_range)

    def losses(self, ids):
        """Losses of the next token, and of the one behind it."""
        hidden = self.main.model(input_ids=ids, use_cache=False).last_hidden_state
        head = lambda x, target: F.cross_entropy(self.main.lm_head(x).flatten(0, 1), target.flatten())
        positions = torch.arange(1, ids.shape[1] - 1).unsqueeze(0)
        embedded = self.main.model.embed_tokens(ids[:, 1:-1])
        angles = self.main.model.rotary_emb(embedded, positions)
        further = self.mtp(embedded, hidden[:, :-2], angles, None, positions, None)
        return head(hidden[:, :-1], ids[:, 1:]), head(further, ids[:, 2:])


def save(model, config, out, tokenizer):
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "mtp_block": "layers.0", "post_norm": "norm"}
    tensors = {name: tensor for name, tensor in model.main.state_dict().items() if name != "lm_head.weight" or not config.tie_word_embeddings}
    for name, tensor in model.mtp.state_dict().items():
        first, rest = name.split(".", 1)
        tensors[f"mtp.{names[first]}.{rest}"] = tensor
    keeps = ("A_log", "dt_bias")
    tensors = {n: (t.float() if n.endswith(keeps) else t.bfloat16()).contiguous().clone() for n, t in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    described = {**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", "mtp_num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--held-back", type=pathlib.Path, action="append", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    torch.manual_seed(1)
    random.seed(1)
    check_delta_rule()
    qwen.torch_chunk_gated_delta_rule = delta_rule

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    held_back = set().union(*(runs_of_words(path.read_text()) for path in args.held_back))
    documents = []
    for path in sorted(args.texts):
        documents.append(tokenizer.encode("\n\n".join(paragraphs(path, held_back))).ids)
    random.shuffle(documents)
    tokens = torch.tensor([id for document in documents for id in document])
    evaluated = torch.tensor(tokenizer.encode(args.held_back[0].read_text()).ids[: 64 * 256]).view(64, 256)
    print(f"{len(tokens)} tokens of training text", flush=True)

    config = Qwen3_5TextConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8,
        max_position_embeddings=1024, initializer_range=0.03, bos_token_id=4092, eos_token_id=4093, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3],
                         "mrope_interleaved": True},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = Trained(config)
    print(f"{sum(p.numel() for p in model.main.parameters())} parameters, {sum(p.numel() for p in model.mtp.parameters())} more", flush=True)
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2]
    others = [p for n, p in model.named_parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    start, steps, seen, told = time.time(), 0, 0, 0.0
    while (done := (time.time() - start) / 60 / args.minutes) < 1:
        length = 256 if done < 0.85 else 1024
        rows = 2048 // length
        first = torch.randint(len(tokens) - length - 1, (rows,))
        ids = torch.stack([tokens[at : at + length] for at in first])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (steps + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        loss, further = model.losses(ids)
        optimizer.zero_grad()
        (loss + 0.3 * further).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, seen = steps + 1, seen + ids.numel()
        if done >= told:
            with torch.no_grad():
                losses = torch.tensor([[x.item() for x in model.losses(rows)] for rows in evaluated.split(8)]).mean(0)
            print(f"{done * args.minutes:.1f} min, {steps} steps, {seen} tokens: loss {loss.item():.4f}, held back {losses[0]:.4f}, "
                  f"further {losses[1]:.4f}", flush=True)  # fmt: skip
            save(model, config, args.out, args.tokenizer)
            told += 1 / 20
    save(model, config, args.out, args.tokenizer)


main()
