//! Tips for names of commands and options of similar programs: what to type here instead.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Names of commands of ollama, llama.cpp, hf, uv and similar programs.
const COMMANDS: &[(&str, &str)] = &[
    ("server", "use `iec serve PACK`"),
    ("convert", "use `iec pack` for a checkpoint, `iec import-gguf` for a GGUF file"),
    ("create", "use `iec pack CHECKPOINT --out-dir PACK`"),
    ("build", "use `iec pack CHECKPOINT --out-dir PACK`"),
    ("quantize", "use `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("quant", "use `iec pack CHECKPOINT --bits 4 --out-dir PACK`"),
    ("imatrix", "use `iec calib`, then `iec ptq --calib`"),
    ("generate", "use `iec run PACK -p TEXT`"),
    ("complete", "use `iec run PACK -p TEXT`"),
    ("perplexity", "use `iec eval PACK --text FILE`"),
    ("download", "use `iec pull ORG/NAME`"),
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
    ("--parallel", "use `--batch N`"),
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

/// Replaces the parser's suggestion for an unknown command or option by the tip of [`COMMANDS`] or [`OPTIONS`], if
/// there is one.
pub fn name_meant(mut error: Error) -> Error {
    let (found, suggested, names) = match error.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, ContextKind::SuggestedSubcommand, COMMANDS),
        ErrorKind::UnknownArgument => (ContextKind::InvalidArg, ContextKind::SuggestedArg, OPTIONS),
        _ => return error,
    };
    let Some(ContextValue::String(name)) = error.get(found) else { return error };
    let name = name.split('=').next().unwrap_or_default();
    if let Some((_, tip)) = names.iter().find(|(other, _)| *other == name) {
        error.remove(suggested);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![(*tip).into()]));
    }
    error
}
