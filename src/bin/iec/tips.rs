//! Tips for names of commands and options of similar programs: what to type here instead.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Tip for a name of a command that downloads: builds without the feature `hub` cannot.
const DOWNLOAD: &str = match cfg!(feature = "hub") {
    true => "use `iec pull ORG/NAME`",
    false => "use `hf download ORG/NAME`; then `iec run ORG/NAME` finds it",
};

/// Names of commands of ollama, llama.cpp, hf, uv and similar programs.
const COMMANDS: &[(&str, &str)] = &[
    ("server", "use `iec serve PACK`"),
    ("convert", "use `iec pack` for a checkpoint, `iec import-gguf` for a GGUF file"),
    ("create", "use `iec pack CHECKPOINT --out-dir PACK`"),
    ("build", "use `iec pack CHECKPOINT --out-dir PACK`; `cargo build --release` builds the program itself"),
    ("update", "get the new source and build it with `cargo build --release`; nothing updates itself"),
    ("upgrade", "get the new source and build it with `cargo build --release`; nothing updates itself"),
    ("install", DOWNLOAD),
    ("login", "use `hf auth login`, or set HF_TOKEN; only downloads need it"),
    ("models", "use `iec list`"),
    ("ls", "use `iec list`"),
    ("remove", "use `iec rm MODEL`"),
    ("delete", "use `iec rm MODEL`"),
    ("llama-cli", "use `iec run MODEL -p TEXT`, or `iec chat MODEL`"),
    ("llama-server", "use `iec serve MODEL`"),
    ("llama-bench", "use `iec bench MODEL`"),
    ("quantize", "use `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("quant", "use `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("imatrix", "use `iec calib`, then `iec ptq --calib`"),
    ("generate", "use `iec run PACK -p TEXT`"),
    ("complete", "use `iec run PACK -p TEXT`"),
    ("perplexity", "use `iec eval PACK --text FILE`"),
    ("download", DOWNLOAD),
    ("push", "packs are directories: copy them; nothing is uploaded"),
    ("upload", "packs are directories: copy them; nothing is uploaded"),
    ("cp", "packs are directories: use `cp -r`"),
    ("copy", "packs are directories: use `cp -r`"),
    ("ps", "no model stays in memory after its command ends; `ps` of the system lists running commands"),
    ("stop", "no model stays in memory after its command ends; Ctrl-C ends a running one"),
    ("info", "use `iec show MODEL`"),
    ("cat", "use `iec inspect PATH --tensors`"),
    ("hash", "use `iec verify PACK --hashes`"),
    ("split", "use `iec unpack PACK --max-shard-size SIZE --out-dir DIR`"),
    ("gguf-split", "use `iec unpack PACK --max-shard-size SIZE --out-dir DIR`"),
    ("tokenize", "use `iec run PACK -p TEXT -n 1 --trace-ids FILE`; the first line of FILE has the token ids"),
    ("completion", "use `iec completions SHELL`"),
    ("generate-shell-completion", "use `iec completions SHELL`"),
    ("version", "use `iec --version`; `-v` adds details"),
];

/// Names of options.
const OPTIONS: &[(&str, &str)] = &[
    ("--hf-repo", "name the repository as the model: `iec run ORG/NAME` or `iec pack ORG/NAME --out-dir PACK`"),
    ("--model-path", "name the pack after the command, or with `--model-dir DIR`"),
    ("--model-name", "name the pack after the command, or with `--model-dir DIR`"),
    ("--model-name-or-path", "name the pack after the command, or with `--model-dir DIR`"),
    ("--pretrained", "name the pack after the command, or with `--model-dir DIR`"),
    ("--file", "use `--prompts-file FILE`, or `< FILE` for one prompt"),
    ("-f", "use `--prompts-file FILE`, or `< FILE` for one prompt"),
    ("--prompt-file", "use `--prompts-file FILE`, or `< FILE` for one prompt"),
    ("--interactive", "use `--chat`"),
    ("-i", "use `--chat`"),
    ("--conversation", "use `--chat`"),
    ("--system-prompt", "use `--system TEXT`"),
    ("--do-sample", "use `--temperature T`, which samples"),
    ("--format", "use `--json`"),
    ("--output-format", "use `--json`"),
    ("--verbose-prompt", "use `--trace-ids FILE`"),
    ("--cache-type-k", "use `--kv TYPE`"),
    ("--cache-type-v", "use `--kv TYPE`"),
    ("--dtype", "use `--precision P` with a pack; `--dtype` belongs to `iec pack`"),
    ("--flash-attn", "attention is always computed in blocks; leave the option out"),
    ("--mlock", "use `--pin`"),
    ("--no-mmap", "use `--prefetch on`, which reads the weights before the first token"),
    ("--model-draft", "use `--draft-model-dir DIR`"),
    ("--parallel", "use `--batch N`; for `serve`, use `--max-seqs N`"),
    ("--max-num-seqs", "use `--max-seqs N`"),
    ("--max-num-batched-tokens", "use `--max-step-tokens N`"),
    ("--batch-size", "use `--batch N`; for `serve`, use `--max-step-tokens N`"),
    ("-b", "use `--batch N`; for `serve`, use `--max-step-tokens N`"),
    ("--ubatch-size", "prompts are read in pieces of a fixed size; leave the option out"),
    ("--tp", "use `--device cuda:0,1`, which divides the layers among these GPUs"),
    ("--tensor-parallel-size", "use `--device cuda:0,1`, which divides the layers among these GPUs"),
    ("--pipeline-parallel-size", "use `--device cuda:0,1`, which divides the layers among these GPUs"),
    ("--tensor-split", "use `--device cuda:0,1`, which divides the layers among these GPUs"),
    ("--split-mode", "use `--device cuda:0,1`, which divides the layers among these GPUs"),
    ("--main-gpu", "use `--device cuda:N`"),
    ("--served-model-name", "use `--model NAME=MODEL`"),
    ("--alias", "use `--model NAME=MODEL`"),
    ("-a", "use `--model NAME=MODEL`"),
    ("--api-key", "use `--api-key-file FILE`, or put one key into the variable IEC_API_KEY"),
    ("--image", "only texts are read: the parts of a model for images and sound are left out"),
    ("--audio", "only texts are read: the parts of a model for images and sound are left out"),
    ("--mmproj", "only texts are read: the parts of a model for images and sound are left out"),
    ("--jinja", "chat templates are always rendered; leave the option out"),
    ("--no-jinja", "use `--raw` to continue a text without a chat template"),
    ("--chat-template-file", "use `--chat-template FILE`, with a `/` or a `.` in the name"),
    ("--trust-remote-code", "no code of a checkpoint is ever run; leave the option out"),
    ("--enforce-eager", "there are no graphs to turn off; leave the option out"),
    ("--gpu-memory-utilization", "use `--kv-memory SIZE`"),
    ("--kv-cache-dtype", "use `--kv TYPE`"),
    ("--quantization", "use `--precision int4`, or `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("--load-in-4bit", "use `--precision int4`, or `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("--enable-prefix-caching", "common beginnings of prompts are computed once; leave the option out"),
    ("--cont-batching", "requests join the running batch at once; leave the option out"),
    ("--enable-auto-tool-choice", "the chat template tells the notation of function calls; leave the option out"),
    ("--tool-call-parser", "the chat template tells the notation of function calls; leave the option out"),
    ("--reasoning-parser", "the chat template tells how reasoning is marked; leave the option out"),
    ("--lora-modules", "use `--lora NAME=DIR`"),
    ("--enable-lora", "use `--lora NAME=DIR`"),
    ("--revision", "name the revision with the repository: `ORG/NAME@REVISION`"),
    ("--download-dir", "set HF_HOME"),
    ("--keep-alive", "a server holds its models until it ends; leave the option out"),
    ("--hidethinking", "use `--think off`"),
    ("--reverse-prompt", "use `--stop TEXT`"),
    ("-r", "use `--stop TEXT`"),
    ("-s", "use `--seed N`"),
    ("--rounds", MEASURES),
    ("--warmup", MEASURES),
    ("--aggregate", MEASURES),
    ("--expected-tokens", MEASURES),
    ("--n-prompt", "use `--prompt-len N`"),
    ("--n-gen", "use `--max-new N`"),
    ("--repetitions", "use `--runs N`"),
    ("--local-dir", "use `--out-dir DIR`; `--local-dir` belongs to `iec pull`"),
    ("--outfile", "use `--out FILE` or `--out-dir DIR`"),
    ("--outtype", "use `--bits N` or `--dtype TYPE`"),
    ("--imatrix", "use `--calib STATS`"),
    ("--quantize", "use `--bits 4`"),
    ("--q-bits", "use `--bits N`"),
    ("--q-group-size", "use `--group-size N`"),
    ("--force", "use `--overwrite`"),
    ("--yes", "nothing asks a question; leave the option out"),
    ("-y", "nothing asks a question; leave the option out"),
    ("--no-progress", "use `--quiet`"),
    ("--log-level", "use `-v`, or IEC_LOG=debug"),
    ("--cpu", "use `--device cpu`"),
    ("--gpu", "use `--device cuda`"),
    ("--cuda", "use `--device cuda`"),
];

/// Names of scripts, make targets and programs of the predecessor, without directory and extension and with hyphens as
/// underscores. docs/guide/predecessor.md maps their options, too.
const OLD_COMMANDS: &[(&str, &str)] = &[
    ("hf_to_iebin", PACK),
    ("hf_to_iebin_raw", PACK),
    ("hf_to_iebin_stream", PACK),
    ("hf_to_iebin_stream_pt", PACK),
    ("ptq_from_hf", "use `iec ptq CHECKPOINT --bits 4 --out MANIFEST`"),
    ("ptq_from_bin", "use `iec ptq --model-dir PACK --bits 4 --out MANIFEST`"),
    ("ptq_from_source", "use `iec ptq CHECKPOINT --bits 8 --out MANIFEST`"),
    ("gen_q4_bytes_stream", "use `iec q4 CHECKPOINT --out-dir Q4`"),
    ("gen_q4_bytes_stream_all", "use `iec q4 CHECKPOINT --out-dir Q4` for each checkpoint"),
    ("append_q4_attn_from_hf", "use `iec q4 --append-attn --model-dir PACK --hf-dir CHECKPOINT`"),
    ("run_quant_and_dedup", "use `iec pack CHECKPOINT --bits 4 --out-dir PACK`, then `iec dedup PACK`"),
    ("rebuild_dedup_and_quant", "use `iec dedup --restore --model-dir PACK --out-dir NEW`, then pack and dedup again"),
    ("make_tensor_map_from_iejson", "use `iec tensor-map PACK`"),
    ("verify_hf_generation_ids", "use `iec verify PACK --hf-dir CHECKPOINT`"),
    ("build_cuda", "one binary computes on CPUs and GPUs: `cargo build --release`, then `iec devices`"),
    ("bench_cuda", "use `iec bench PACK --device cuda`"),
    ("bench_report", "use `iec bench PACK --report-root DIR`"),
    ("inference_engine", "use `iec run PACK -p TEXT`, or `iec bench PACK` to measure"),
    ("profile", "use `iec bench PACK --profile`"),
];

/// Tip for options that measure.
const MEASURES: &str = "use `iec bench`, which has this option, and `--prompt TEXT`, too";

/// Tip for the converters of the predecessor.
const PACK: &str = "use `iec pack CHECKPOINT --out-dir PACK`";

/// Values of options that mean something else in similar programs: the beginning of the option as the parser shows it,
/// the value, and what to type here.
const VALUES: &[(&str, &str, &str)] = &[
    ("--max-new ", "-1", "there is no number for `unlimited`: a text ends where its context ends, so use a large one"),
    ("--max-new ", "-2", "there is no number for `unlimited`: a text ends where its context ends, so use a large one"),
    ("--seed ", "-1", "leave --seed out; `iec chat` then draws a seed"),
    ("--ctx ", "-1", "leave --ctx out for the context of the model"),
    ("--threads ", "-1", "leave --threads out, or use `auto`"),
    ("--threads ", "0", "leave --threads out, or use `auto`"),
    ("--gpu-layers ", "-1", "leave --gpu-layers out for all layers"),
    ("--gpu-layers ", "all", "leave --gpu-layers out for all layers"),
    ("--top-k ", "-1", "leave --top-k out to keep all tokens"),
];

/// Replaces the parser's suggestion for an unknown command or option, or for a value that other programs accept, by the
/// tip of the tables of this file, if there is one.
pub fn name_meant(mut error: Error) -> Error {
    let text = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let named =
        |names: &[(&str, &'static str)], name: &str| names.iter().find(|(other, _)| *other == name).map(|row| row.1);
    let (tip, suggested) = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = text(ContextKind::InvalidSubcommand);
            (named(COMMANDS, name).or_else(|| named(OLD_COMMANDS, &old_name(name))), ContextKind::SuggestedSubcommand)
        }
        ErrorKind::UnknownArgument => {
            let name = text(ContextKind::InvalidArg).split('=').next().unwrap_or_default();
            (named(OPTIONS, name), ContextKind::SuggestedArg)
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let (option, value) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue));
            let found = VALUES.iter().find(|(name, other, _)| option.starts_with(name) && value == *other);
            (found.map(|row| row.2), ContextKind::SuggestedValue)
        }
        _ => return error,
    };
    if let Some(tip) = tip {
        error.remove(suggested);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Returns the name under which [`OLD_COMMANDS`] has a script or a program.
fn old_name(word: &str) -> String {
    let file = word.rsplit('/').next().unwrap_or_default();
    let stem = [".py", ".sh"].iter().find_map(|extension| file.strip_suffix(extension)).unwrap_or(file);
    stem.replace('-', "_")
}
