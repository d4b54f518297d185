//! Checks the rules for the sources of the crate: which module of `src/` may import which, where unsafe code is
//! allowed, how large files and functions may become, and how comments are worded.
//!
//! [`MODULES`] is the table shown in docs/DESIGN.md. Most rules read the sources below `src/` without
//! comments and tests. Most are themselves tested with a planted mistake. docs/DESIGN.md shows the limits, and
//! `cargo test --test house -- --nocapture counts` prints the present numbers.
//!
//! The test uses only the standard library, so it can be run without building the crate, within two seconds:
//! `rustc --edition 2024 --test tests/house.rs -o target/house && target/house`.

#![allow(clippy::disallowed_methods, clippy::print_stdout)]

#[path = "house/counts.rs"]
mod counts;
#[path = "house/graph.rs"]
mod graph;
#[path = "house/language.rs"]
mod language;
#[path = "house/source.rs"]
mod source;

use source::{Source, Sources};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::LazyLock;

/// Sources of this checkout.
static SOURCES: LazyLock<Sources> = LazyLock::new(Sources::read);

/// Module of the crate, the question it answers, and the modules it may import.
struct Module {
    name: &'static str,
    question: &'static str,
    /// Earlier modules of the table, or their submodules. Every module may also import the ground modules.
    may_import: &'static [&'static str],
}

/// Some of the ground modules: basic modules that every other module may import. They import each other within a shelf
/// and those of earlier shelves.
struct Shelf {
    name: &'static str,
    question: &'static str,
    modules: &'static [&'static str],
}

const GROUND: &[Shelf] = &[
    Shelf {
        name: "tools",
        question: "what does any code need? errors, reading and mapping, memory, progress, hashes, random numbers",
        modules: &[
            "error",
            "files",
            "interrupt",
            "mapped",
            "progress",
            "resources",
            "rng",
            "sha256",
            "simd",
            "similar",
            "task",
            "units",
            "windowed",
        ],
    },
    Shelf {
        name: "writing",
        question: "how are files written so that only complete ones have final names, and long work can go on?",
        modules: &["job", "output", "strict_json"],
    },
    Shelf {
        name: "model",
        question: "what is a model, an artifact, a tensor, a scheme?",
        modules: &[
            "adapter",
            "calibration",
            "catalogue",
            "dtype",
            "iebin",
            "manifest",
            "model_config",
            "provenance",
            "quant_spec",
            "scheme",
            "tokenizer_limits",
        ],
    },
];

/// Returns the names of all ground modules.
fn ground() -> Vec<&'static str> {
    GROUND.iter().flat_map(|shelf| shelf.modules).copied().collect()
}

/// Returns the index of the shelf of a ground module.
fn shelf_of(name: &str) -> Option<usize> {
    GROUND.iter().position(|shelf| shelf.modules.contains(&name))
}

const MODULES: &[Module] = &[
    Module { name: "quant", question: "how do floats become blocks, and was it good enough?", may_import: &[] },
    Module { name: "dedup", question: "which bytes are stored twice?", may_import: &[] },
    Module {
        name: "convert",
        question: "how does a Hugging Face checkpoint become an artifact?",
        may_import: &["quant"],
    },
    Module {
        name: "sched",
        question: "which sequence computes how many tokens in the next step? (no clock, threads or I/O)",
        may_import: &[],
    },
    Module { name: "runtime", question: "how does an artifact compute logits?", may_import: &[] },
    Module {
        name: "generate",
        question: "how do prompts become answers? tokenizer, chat template, batches, drafts, constraints, samplers",
        may_import: &["sched", "runtime"],
    },
    Module { name: "eval", question: "how well does it answer?", may_import: &["runtime", "generate"] },
    Module {
        name: "verify",
        question: "is the answer the one Hugging Face gives? (candle-core as an independent reference)",
        may_import: &[],
    },
    Module { name: "signature", question: "who made a pack, and was it changed since?", may_import: &[] },
    Module {
        name: "trial",
        question: "is a quantized model as good as the original, and which tensor is to blame?",
        may_import: &["quant", "convert", "eval", "runtime", "generate", "verify", "signature"],
    },
    Module {
        name: "selfcheck",
        question: "does a GPU compute what the CPU computes, and how fast?",
        may_import: &["runtime"],
    },
    Module {
        name: "tools",
        question: "which tools may an answer call, and which parts of a text are calls and reasoning?",
        may_import: &["generate"],
    },
    Module {
        name: "session",
        question: "what does an opened pack need to answer? template, sampling, adapters, plan of memory, metrics",
        may_import: &["dedup", "convert::adapter", "runtime", "generate", "tools"],
    },
    Module {
        name: "models",
        question: "what does a user mean by a model? pack, checkpoint, GGUF file or name; cache of packs",
        may_import: &["convert", "runtime", "generate", "trial", "session"],
    },
    Module {
        name: "host",
        question: "which thread owns a session, and how do requests reach it? (events, cancellation, metrics, drain)",
        may_import: &["runtime", "generate", "sched", "tools", "session"],
    },
    Module {
        name: "api",
        question: "what may a request ask, and how does its answer look as JSON?",
        may_import: &["runtime", "generate", "sched", "tools", "session", "host"],
    },
    Module {
        name: "chat",
        question: "what is a conversation? history, commands, settings, answers that reuse what was read",
        may_import: &["runtime", "generate", "tools", "session", "host", "api"],
    },
    Module {
        name: "serve",
        question: "how do many clients use models over HTTP?",
        may_import: &["convert", "runtime", "generate", "sched", "tools", "session", "models", "host", "api"],
    },
    Module {
        name: "report",
        question: "how are results shown?",
        may_import: &[
            "quant",
            "convert",
            "runtime",
            "generate",
            "eval",
            "verify",
            "signature",
            "trial",
            "session",
            "models",
            "sched",
        ],
    },
    Module {
        name: "inspect",
        question: "what does a checkpoint, pack, weight file or manifest hold?",
        may_import: &["quant", "dedup", "convert", "runtime", "report"],
    },
    Module {
        name: "facade",
        question: "which names may other programs rely on? an engine that answers, conversions, errors",
        may_import: &[
            "quant",
            "convert",
            "runtime",
            "generate",
            "sched",
            "tools",
            "session",
            "models",
            "host",
            "api",
            "report",
            "inspect",
            "signature",
            "trial",
        ],
    },
];

/// Files and folders that may contain unsafe code.
const UNSAFE: &[&str] = &[
    "src/bin/iec/fatal/",
    "src/mapped.rs",
    "src/mapped/slab.rs",
    "src/runtime/cpu/",
    "src/runtime/cuda/context.rs",
    "src/runtime/cuda/driver.rs",
    "src/runtime/cuda/ops.rs",
    "src/simd.rs",
    "src/windowed/",
];

/// Names of model families, which must not appear in the runtime.
const FAMILIES: &[&str] =
    &["llama", "mistral", "mixtral", "qwen", "gemma", "phi", "gptoss", "falcon", "deepseek", "olmo", "granite"];

/// Words that contain the name of a family but have another meaning.
const NOT_FAMILIES: &[(&str, &str)] = &[("src/runtime/rope.rs", "llama")]; // `llama3`, a kind of rotary scaling

/// Names that may be used only in the binary: printing, the environment, ending the process.
const FOR_BINARY: &[&str] =
    &["println!", "print!", "eprintln!", "eprint!", "dbg!", "env::var", "env::var_os", "env::args", "process::exit"];
const CRATES_FOR_BINARY: &[&str] = &["clap", "indicatif"];

/// Files of the library that may use [`FOR_BINARY`].
const IN_LIBRARY: &[&str] = &[];

/// Files that may have sequences for terminals: the one that prints, and the editor of lines.
const TERMINALS: &[&str] = &["src/bin/iec/chat/editor.rs", "src/bin/iec/console.rs"];

/// Places that know what the state of a text holds: the interface, and the devices.
const DEVICES: [&str; 5] =
    ["src/runtime/state.rs", "src/runtime/kv/", "src/runtime/attention/", "src/runtime/forward/", "src/runtime/cuda/"];

/// Parts of the runtime that are independent of the devices.
const DEVICELESS: &[&str] = &["src/generate/", "src/runtime/engine"];

/// Maximum number of files in an import cycle.
const LARGEST_CIRCLE: usize = 7;
/// Maximum lines of code in a file.
const LARGEST_FILE: usize = 450;
/// Maximum lines of code in a function, except those of [`LARGE_FUNCTIONS`].
const LARGEST_FUNCTION: usize = 60;
const LARGE_FUNCTIONS: &[(&str, &str)] = &[];
/// Maximum lines of code in the binary, which turns arguments into options and prints: work belongs in the library.
const LARGEST_BINARY: usize = 9_000;
/// Maximum share of a module of the library in all lines of code, in percent.
const LARGEST_SHARE: usize = 21;
/// Maximum number of types with the same name.
const SHARED_NAME: usize = 4;
/// Names of types that more types may share: every command has its `Args`.
const SHARED_NAMES: &[&str] = &["Args"];
/// Maximum number of lines over 120 columns. It may only decrease.
const LONG_LINES: usize = 41;

/// Files that may contain a word of [`language::BANNED`], with that word.
const ALLOWED_WORDS: &[(&str, &str)] = &[];

/// Formats the table of modules in docs/DESIGN.md.
fn module_table() -> String {
    let mut rows = vec!["| module | question it answers | may import |".to_string(), "|---|---|---|".to_string()];
    for (i, shelf) in GROUND.iter().enumerate() {
        let may: Vec<_> = GROUND[..i].iter().map(|shelf| format!("ground ({})", shelf.name)).collect();
        let may = if may.is_empty() { "nothing".into() } else { may.join(", ") };
        let modules = shelf.modules.join(" ");
        rows.push(format!("| ground ({}): `{modules}` | {} | {may} |", shelf.name, shelf.question));
    }
    for module in MODULES {
        let may = ["ground".to_string()].into_iter().chain(module.may_import.iter().map(|name| format!("`{name}`")));
        rows.push(format!("| `{}` | {} | {} |", module.name, module.question, may.collect::<Vec<_>>().join(", ")));
    }
    rows.push("| `bin/iec` | which command does what? | everything |".to_string());
    rows.join("\n")
}

/// Formats the table of limits in docs/DESIGN.md.
fn limit_table() -> String {
    let rows = [
        ("files in a circle of imports", LARGEST_CIRCLE.to_string()),
        ("lines of code of a file", LARGEST_FILE.to_string()),
        ("lines of code of a function", LARGEST_FUNCTION.to_string()),
        ("lines of code of the binary", LARGEST_BINARY.to_string()),
        ("share of a module of the library in all lines of code", format!("{LARGEST_SHARE} %")),
        ("types of one name, but for the `Args` of commands", SHARED_NAME.to_string()),
        ("lines over 120 columns in `src`", LONG_LINES.to_string()),
    ];
    let rows: String = rows.iter().map(|(limit, value)| format!("| {limit} | {value} |\n")).collect();
    format!("| largest number of | limit |\n|---|---|\n{rows}")
}

/// Finds imports that the table does not allow, and modules that it does not list.
fn forbidden_imports(sources: &Sources) -> Vec<String> {
    let module = |name: &str| MODULES.iter().find(|module| module.name == name);
    let known = |top: &str| shelf_of(top).is_some() || module(top).is_some() || ["bin", "lib"].contains(&top);
    let tops: BTreeSet<&str> = sources.files.iter().map(Source::top).collect();
    let unknown = tops.into_iter().filter(|top| !known(top));
    let mut found: Vec<String> = unknown.map(|top| format!("src/{top}: in neither MODULES nor GROUND")).collect();
    for import in graph::imports(sources) {
        let (from, to) = (&sources.files[import.from], &sources.files[import.to]);
        let within = |allowed: &str| (import.path[1..].join("::") + "::").starts_with(&format!("{allowed}::"));
        let may = module(from.top()).map_or(&[][..], |module| module.may_import);
        let allowed = from.top() == to.top()
            || ["bin", "lib"].contains(&from.top())
            || shelf_of(to.top()).is_some_and(|to| shelf_of(from.top()).is_none_or(|from| to <= from))
            || to.top() == "lib"
            || !known(to.top())
            || may.iter().any(|allowed| within(allowed));
        if !allowed {
            found.push(format!("{}:{}: imports `{}`", from.path, import.line, import.path.join("::")));
        }
    }
    found
}

/// Finds cycles of imports among ground modules.
fn circles_in_ground(sources: &Sources) -> Vec<String> {
    let ground = ground();
    let module = |file: usize| ground.iter().position(|name| *name == sources.files[file].top());
    let imports = graph::imports(sources);
    let arrows: Vec<_> = imports.iter().filter_map(|i| Some((module(i.from)?, module(i.to)?))).collect();
    let names = |circle: &Vec<usize>| circle.iter().map(|n| ground[*n]).collect::<Vec<_>>().join(", ");
    graph::circles(ground.len(), &arrows).iter().map(names).collect()
}

/// Finds import cycles of more than `most` files.
fn large_circles(sources: &Sources, most: usize) -> Vec<String> {
    let arrows: Vec<_> = graph::imports(sources).iter().map(|import| (import.from, import.to)).collect();
    let paths = |circle: &Vec<usize>| circle.iter().map(|n| &*sources.files[*n].path).collect::<Vec<_>>().join(" ");
    let circles = graph::circles(sources.files.len(), &arrows);
    circles.iter().filter(|c| c.len() > most).map(|c| format!("{} files: {}", c.len(), paths(c))).collect()
}

/// Finds the places in `files` where the text has one of `words` as a whole word, except in the files that `allowed`
/// lists.
fn words<'a>(
    files: impl IntoIterator<Item = &'a Source>,
    text: fn(&Source) -> &str,
    words: &[&str],
    allowed: &[&str],
) -> Vec<String> {
    let mut found = Vec::new();
    for file in files.into_iter().filter(|file| !allowed.iter().any(|place| file.path.starts_with(place))) {
        for (line, text) in text(file).lines().enumerate() {
            let hits = words.iter().filter(|word| has_word(text, word));
            found.extend(hits.map(|word| format!("{}:{}: {word}", file.path, line + 1)));
        }
    }
    found
}

fn has_word(text: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(at, _)| {
        let open = word.ends_with(|c: char| c.is_alphanumeric());
        let behind = text[at + word.len()..].chars().next().filter(|_| open);
        !part(text[..at].chars().next_back()) && !part(behind)
    })
}

fn unsafe_code(sources: &Sources) -> Vec<String> {
    words(&sources.files, |file| &file.bare, &["unsafe"], UNSAFE)
}

/// Finds files that print or style text beside the one that makes text from outside harmless for a terminal.
fn other_doors_to_terminals(sources: &Sources) -> Vec<String> {
    let sequences = ["\\x1b", "\\u{1b}", "\\u{9b}"];
    let mut found = Vec::new();
    for file in sources.files.iter().filter(|file| !TERMINALS.contains(&&*file.path)) {
        let lines = file.code.lines().enumerate();
        let hits = lines.filter(|(_, line)| sequences.iter().any(|sequence| line.contains(sequence)));
        found.extend(hits.map(|(n, _)| format!("{}:{}: a sequence for terminals", file.path, n + 1)));
    }
    let binary = sources.files.iter().filter(|file| file.top() == "bin");
    found.extend(words(binary, |file| &file.bare, &["print!", "println!", "eprint!", "eprintln!"], &[]));
    found
}

fn work_of_the_binary(sources: &Sources) -> Vec<String> {
    let library = || sources.files.iter().filter(|file| file.top() != "bin");
    let mut found = words(library(), |file| &file.bare, FOR_BINARY, IN_LIBRARY);
    found.extend(words(library(), |file| &file.bare, CRATES_FOR_BINARY, &[]));
    found
}

/// Finds the places of the runtime that name a family, alone or as a part of a name, in code or strings.
fn families_in_runtime(sources: &Sources) -> Vec<String> {
    let mut found = Vec::new();
    for file in sources.files.iter().filter(|file| file.top() == "runtime") {
        for (n, line) in file.code.lines().enumerate() {
            let joined = line.replace(['-', '_'], "").replace("GptOss", "gptoss");
            let names = parts_of_names(line).into_iter().chain(joined.contains("gptoss").then(|| "gptoss".to_string()));
            let is_family = |part: &String| {
                FAMILIES.contains(&part.as_str()) && !NOT_FAMILIES.contains(&(file.path.as_str(), part.as_str()))
            };
            found.extend(names.filter(is_family).map(|part| format!("{}:{}: {part}", file.path, n + 1)));
        }
    }
    found
}

/// Splits all names in a line into parts, in lower case: `PhiLayer_qwen2` has `phi`, `layer` and `qwen`.
fn parts_of_names(line: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut small = false;
    for c in line.chars() {
        if !c.is_alphabetic() || (small && c.is_uppercase()) {
            parts.push(String::new());
        }
        small = c.is_lowercase();
        if c.is_alphabetic() {
            parts.last_mut().expect("never empty").extend(c.to_lowercase());
        }
    }
    parts
}

/// Finds files that must be independent of devices but name one, comments included.
fn devices_named(sources: &Sources) -> Vec<String> {
    let deviceless = |file: &&Source| DEVICELESS.iter().any(|place| file.path.starts_with(place));
    let names = |file: &&Source| file.text.to_lowercase().contains("cuda");
    let files = sources.files.iter().filter(deviceless).filter(names);
    files.map(|file| file.path.clone()).collect()
}

/// Finds files outside the devices that look into the states of texts, which only their device understands.
fn casts_of_states(sources: &Sources) -> Vec<String> {
    let is_device = |file: &&Source| DEVICES.iter().any(|place| file.path.starts_with(place));
    let casts = |file: &&Source| {
        ["KvCache", "downcast_ref", "downcast_mut", ".memory::<"].iter().any(|cast| file.bare.contains(cast))
    };
    let files = sources.files.iter().filter(|file| file.path.starts_with("src/") && !is_device(file)).filter(casts);
    files.map(|file| file.path.clone()).collect()
}

/// Finds files and functions that are too long.
fn too_long(sources: &Sources) -> Vec<String> {
    let files = sources.files.iter().filter(|file| file.code_lines() > LARGEST_FILE);
    let mut found: Vec<String> = files.map(|file| format!("{}: {} lines", file.path, file.code_lines())).collect();
    for f in counts::functions(sources) {
        if f.lines > LARGEST_FUNCTION && !LARGE_FUNCTIONS.contains(&(f.path.as_str(), f.name.as_str())) {
            found.push(format!("{}:{}: `{}` has {} lines", f.path, f.line, f.name, f.lines));
        }
    }
    found
}

/// Finds names that too many types share.
fn shared_names(sources: &Sources) -> Vec<String> {
    let types = counts::types(sources);
    let shared = types.iter().filter(|(name, files)| files.len() > SHARED_NAME && !SHARED_NAMES.contains(name));
    shared.map(|(name, files)| format!("{} types are named `{name}`: {}", files.len(), files.join(" "))).collect()
}

/// Finds modules with too large a part of the code.
fn large_modules(sources: &Sources) -> Vec<String> {
    let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
    sources.files.iter().for_each(|file| *lines.entry(file.top()).or_default() += file.code_lines());
    let all: usize = lines.values().sum();
    let is_large = |(name, lines): &(&&str, &usize)| match **name {
        "bin" => **lines > LARGEST_BINARY,
        _ => **lines * 100 > all * LARGEST_SHARE,
    };
    lines.iter().filter(is_large).map(|(name, lines)| format!("{name}: {lines} of {all} lines")).collect()
}

/// Finds exceptions that are no longer needed.
fn idle_exceptions(sources: &Sources) -> Vec<String> {
    let has = |place: &&&str| !sources.files.iter().any(|file| file.path.starts_with(**place));
    let places = UNSAFE.iter().chain(IN_LIBRARY).chain(TERMINALS);
    let mut found: Vec<String> = places.filter(has).map(|place| format!("{place}: there is no such file")).collect();
    let long = counts::functions(sources);
    let is_long = |(path, name): &(&str, &str)| {
        long.iter().any(|f| f.path == *path && f.name == *name && f.lines > LARGEST_FUNCTION)
    };
    let idle = LARGE_FUNCTIONS.iter().filter(|function| !is_long(function));
    found.extend(idle.map(|(path, name)| format!("`{name}` in {path}: has at most {LARGEST_FUNCTION} lines")));
    found
}

/// Packages of this repository.
const OWN: [&str; 3] = ["iec", "iec-capi", "iec-python"];

/// Returns the packages of a lock file that do not come from crates.io with a checksum, except those of this
/// repository.
fn unpinned(lock: &str) -> Vec<String> {
    let registry = "\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\nchecksum = \"";
    let packages = lock.split("[[package]]\nname = \"").skip(1).filter(|package| !package.contains(registry));
    packages
        .filter_map(|package| package.split('"').next())
        .filter(|name| !OWN.contains(name))
        .map(String::from)
        .collect()
}

fn refuse(rule: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

#[test]
fn modules_import_what_the_table_allows() {
    refuse("the table of modules does not allow it", forbidden_imports(&SOURCES));
}

#[test]
fn modules_import_earlier_modules_only() {
    for (i, module) in MODULES.iter().enumerate() {
        for name in module.may_import {
            let top = name.split("::").next();
            assert!(MODULES[..i].iter().any(|earlier| Some(earlier.name) == top), "{} imports {name}", module.name);
        }
    }
}

#[test]
fn documents_show_the_tables_of_modules_and_limits() {
    let (text, table) = (fs::read_to_string("docs/DESIGN.md").unwrap(), module_table());
    assert!(text.contains(&table), "docs/DESIGN.md does not show this table:\n{table}");
}

#[test]
fn modules_of_the_ground_import_one_way() {
    refuse("circles in the ground", circles_in_ground(&SOURCES));
}

#[test]
fn circles_of_files_are_small() {
    refuse("circles of imports", large_circles(&SOURCES, LARGEST_CIRCLE));
}

#[test]
fn unsafe_code_stands_in_its_places() {
    refuse("unsafe code outside the places that may have it", unsafe_code(&SOURCES));
}

#[test]
fn the_runtime_names_no_family() {
    refuse("a family in the runtime; the converter turns it into dims, flags and kinds", families_in_runtime(&SOURCES));
}

#[test]
fn the_library_neither_prints_nor_reads_the_environment() {
    refuse("work of the binary in the library", work_of_the_binary(&SOURCES));
}

#[test]
fn text_reaches_terminals_through_one_file() {
    refuse("a way to a terminal beside src/bin/iec/console.rs", other_doors_to_terminals(&SOURCES));
}

#[test]
fn the_engine_names_no_device() {
    refuse("a device is named", devices_named(&SOURCES));
}

#[test]
fn states_of_texts_are_opaque_outside_the_devices() {
    refuse("a look into the state of a text", casts_of_states(&SOURCES));
    let planted =
        [("src/generate/a.rs", "fn f(c: &Cache) { c.get::<KvCache>() }\n"), ("src/runtime/cuda/b.rs", "KvCache")];
    assert_eq!(casts_of_states(&Sources::of(planted)), ["src/generate/a.rs"]);
}

#[test]
fn dependencies_come_from_the_registry_with_checksums() {
    let design = fs::read_to_string("docs/DESIGN.md").unwrap();
    assert!(design.contains(&limit_table()), "docs/DESIGN.md does not show this table:\n{}", limit_table());
    refuse("a dependency has another source", unpinned(include_str!("../Cargo.lock")));
    let planted = "[[package]]\nname = \"x\"\nversion = \"1.0.0\"\nsource = \"git+https://example.org/x\"\n";
    assert_eq!(unpinned(planted), ["x"]);
}

#[test]
fn files_functions_and_lines_stay_short() {
    let sources = &*SOURCES;
    refuse("too long; look for the second question it answers", too_long(sources));
    refuse("too large; divide it, or move work of the binary into the library", large_modules(sources));
    let long: usize = sources.files.iter().map(counts::long_lines).sum();
    assert!(long <= LONG_LINES, "{long} lines over 120 columns, {LONG_LINES} are allowed");
}

#[test]
fn names_of_types_find_them() {
    refuse("a search for the name finds all of them; name the type by what it is", shared_names(&SOURCES));
}

#[test]
fn comments_begin_with_statements() {
    refuse("a question, a pointer or a fragment", language::openings(&SOURCES));
    let planted = "/// What is counted.\nfn a() {}\n/// The rows.\npub fn b() {}\n/// Counts rows.\nfn c() {}\n/// The rows.\nstruct D;\n";
    assert_eq!(language::openings(&Sources::of([("src/x.rs", planted)])).len(), 2);
}

#[test]
fn private_words_are_not_used() {
    assert!(ALLOWED_WORDS.len() <= 30, "{} exceptions", ALLOWED_WORDS.len());
    refuse("words that hide what is meant", language::banned_words(&SOURCES, ALLOWED_WORDS));
}

#[test]
fn exceptions_are_needed() {
    refuse("exceptions without use", idle_exceptions(&SOURCES));
}

#[test]
fn counts() {
    println!("{}", counts::table(&SOURCES));
}

/// Tests of the rules: they find what they forbid, and nothing in comments, strings and tests.
mod planted {
    use super::*;

    fn places(found: &[String]) -> Vec<&str> {
        found.iter().map(|place| place.split(": ").next().unwrap()).collect()
    }

    #[test]
    fn forbidden_imports_are_found() {
        let sources = Sources::of([
            ("src/convert/mod.rs", "use crate::quant::gate;\nuse crate::{error::Error, runtime::Engine};\n"),
            ("src/dedup/mod.rs", "fn f() {\n    crate::convert::pack();\n}\n// use crate::runtime;\n"),
            ("src/dtype.rs", "pub use super::quant::block;\n"),
            ("src/error.rs", "\n"),
            ("src/extra.rs", "\n"),
            ("src/quant/mod.rs", "#[cfg(test)]\nmod tests {\n    use crate::runtime::cpu;\n}\nuse crate::error;\n"),
            ("src/quant/block/mod.rs", "const TEXT: &str = \"crate::runtime\";\n"),
            ("src/runtime/mod.rs", "use crate::{error::{self, Error}, eval::{}, quant::gate};\n"),
            ("src/bin/iec/main.rs", "use iec::{runtime, convert::pack};\n"),
        ]);
        let found = forbidden_imports(&sources);
        let expected =
            ["src/extra", "src/convert/mod.rs:2", "src/dedup/mod.rs:2", "src/dtype.rs:1", "src/runtime/mod.rs:1"];
        assert_eq!(places(&found), expected);
    }

    #[test]
    fn circles_are_found() {
        let sources = Sources::of([
            ("src/dtype.rs", "use crate::iebin::reader::open;\n"),
            ("src/iebin/mod.rs", "mod reader;\npub use reader::open;\n"),
            ("src/iebin/reader.rs", "use super::Entry;\nuse std::fmt;\n"),
            ("src/scheme.rs", "use crate::dtype;\n"),
            ("src/iebin/writer.rs", "mod inner {\n    use super::super::reader;\n}\nfn f() { crate::scheme::g() }\n"),
        ]);
        assert_eq!(large_circles(&sources, 1), ["2 files: src/iebin/reader.rs src/iebin/mod.rs"]);
        assert!(large_circles(&sources, 2).is_empty());
        assert_eq!(circles_in_ground(&sources).len(), 1, "dtype -> iebin -> scheme -> dtype");
    }

    #[test]
    fn unsafe_code_is_found() {
        let sources = Sources::of([
            ("src/mapped.rs", "unsafe fn f() {}\n"),
            (
                "src/quant/mod.rs",
                "#![deny(unsafe_code)]\n// unsafe\nconst A: &str = r#\"unsafe\"#;\nfn f() { unsafe { g() } }\n",
            ),
        ]);
        assert_eq!(places(&unsafe_code(&sources)), ["src/quant/mod.rs:4"]);
    }

    #[test]
    fn families_are_found() {
        let sources = Sources::of([
            ("src/convert/mod.rs", "fn llama() {}\n"),
            (
                "src/runtime/mod.rs",
                "/* llama */\nfn is_phi3() {}\nstruct QwenLayer;\nlet s = \"gpt-oss\";\nlet alphi = 'p';\n",
            ),
        ]);
        let expected = ["src/runtime/mod.rs:2", "src/runtime/mod.rs:3", "src/runtime/mod.rs:4"];
        assert_eq!(places(&families_in_runtime(&sources)), expected);
    }

    #[test]
    fn work_of_the_binary_is_found() {
        let sources = Sources::of([
            ("src/bin/iec/main.rs", "use clap::Parser;\nfn main() { println!() }\n"),
            (
                "src/quant/mod.rs",
                "use std::env;\nfn f() { env::var(\"A\"); std::process::exit(1) }\nuse clap::ValueEnum;\n",
            ),
            ("src/eval/mod.rs", "fn f() { let clapper = 'x'; writeln!(out); eprintln!(\"a\") }\n"),
        ]);
        let expected = ["src/quant/mod.rs:2", "src/quant/mod.rs:2", "src/eval/mod.rs:1", "src/quant/mod.rs:3"];
        assert_eq!(places(&work_of_the_binary(&sources)), expected);
    }

    #[test]
    fn other_doors_to_terminals_are_found() {
        let sources = Sources::of([
            ("src/bin/iec/console.rs", "const RED: &str = \"\\x1b[31m\";\n"),
            ("src/bin/iec/show.rs", "fn f() {\n    println!(\"a\");\n    note(\"\\x1b[2m\");\n}\n// \\x1b\n"),
        ]);
        assert_eq!(places(&other_doors_to_terminals(&sources)), ["src/bin/iec/show.rs:3", "src/bin/iec/show.rs:2"]);
    }

    #[test]
    fn devices_are_found() {
        let sources = Sources::of([
            ("src/generate/mod.rs", "// Cuda computes it\n"),
            ("src/runtime/cuda/mod.rs", "fn cuda() {}\n"),
        ]);
        assert_eq!(devices_named(&sources), ["src/generate/mod.rs"]);
    }

    #[test]
    fn long_functions_and_files_are_found() {
        let lines = |n: usize| "    f();\n\n    // g();\n".repeat(n);
        let function = |n: usize| format!("fn f() {{\n{}}}\n", lines(n - 2));
        let sources = Sources::of([
            ("src/dtype.rs", function(60).as_str()),
            ("src/scheme.rs", function(61).as_str()),
            ("src/role.rs", function(60).repeat(8).as_str()),
        ]);
        assert_eq!(places(&too_long(&sources)), ["src/role.rs", "src/scheme.rs:1"]);
    }

    #[test]
    fn large_modules_and_shared_names_are_found() {
        let types = |n: usize| (0..n).map(|i| format!("mod m{i} {{\n    struct Kind;\n}}\n")).collect::<String>();
        let sources = Sources::of([
            ("src/quant/mod.rs", types(5).as_str()),
            ("src/eval/mod.rs", "struct Args;\n".repeat(9).replace("Args", "Row(Kind)").as_str()),
            ("src/bin/iec/main.rs", "struct Args;\n".repeat(9_001).as_str()),
        ]);
        let found = shared_names(&sources);
        assert_eq!(places(&found), ["5 types are named `Kind`", "9 types are named `Row`"]);
        assert_eq!(places(&large_modules(&sources)), ["bin"]);
    }

    #[test]
    fn shelves_of_the_ground_import_earlier_ones() {
        let sources = Sources::of([
            ("src/error.rs", "use crate::job::Part;\n"),
            ("src/job/mod.rs", "use crate::{error::Error, output::Lock, scheme::Scheme};\n"),
            ("src/output/mod.rs", "\n"),
            ("src/scheme.rs", "use crate::output::pretty;\n"),
        ]);
        assert_eq!(places(&forbidden_imports(&sources)), ["src/error.rs:1", "src/job/mod.rs:1"]);
    }

    #[test]
    fn repeated_passages_are_counted_once() {
        let passage = "a(1);\nb(2);\nc(3);\n}\nd(4);\ne(5);\nf(6);\ng(7);\n";
        let other = format!("x();\n{passage}y();\n");
        let sources = Sources::of([("src/dtype.rs", passage), ("src/role.rs", other.as_str())]);
        assert_eq!(counts::repeated(&sources).len(), 1);
    }

    #[test]
    fn comments_strings_and_tests_are_not_code() {
        let text = "let a = '\"'; // b\n/* /* c */ d */ let e = r\"\\\"; let f: &'static str = b\"g\\\"h\";\n\
                    #[cfg(test)]\nmod tests {\n    fn i() {}\n}\nlet j = '\\'';\nlet k = \"\nl\n\";\n";
        let source = Source::new("src/dtype.rs", text);
        let bare: String = source.bare.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(bare, "let a = ' '; let e = r \"; let f: &'static str = b\" \"; let j = ' '; let k = \" \";");
        assert_eq!(source.code_lines(), 6);
    }
}
