//! Tests the text of the metrics with a strict parser of the exposition format.

use super::text::{MetricKind, MetricsText};
use super::*;
use crate::generate::speculate::{DraftCounts, Drafter};
use crate::runtime::cpu::counters::Counts;
use crate::runtime::{Stage, Stages};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Labels of a series, ordered by name.
type Labels = BTreeMap<String, String>;

/// Family as the parser found it.
#[derive(Debug, Default)]
struct Parsed {
    kind: String,
    series: Vec<(String, Labels, f64)>,
}

/// Parses a text as Prometheus does, but refuses all that it merely tolerates: a series before its TYPE line, two
/// families of the same name, two equal series, buckets that fall or lack `+Inf`, a last line without a newline.
fn parse(text: &str) -> Result<BTreeMap<String, Parsed>, String> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err("the last line has no newline".into());
    }
    let mut families: BTreeMap<String, Parsed> = BTreeMap::new();
    let (mut current, mut help) = (String::new(), None);
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# HELP ") {
            let (name, text) = comment.split_once(' ').ok_or("HELP without a text")?;
            let escapes = text.replace("\\\\", "").replace("\\n", "");
            if text.is_empty() || escapes.contains('\\') {
                return Err(format!("{line}: an empty text or an unknown escape"));
            }
            help = Some(name.to_string());
        } else if let Some(comment) = line.strip_prefix("# TYPE ") {
            let (name, kind) = comment.split_once(' ').ok_or("TYPE without a kind")?;
            if help.take().as_deref() != Some(name) || !["counter", "gauge", "histogram"].contains(&kind) {
                return Err(format!("{line}: no HELP line before it, or an unknown kind"));
            }
            let parsed = Parsed { kind: kind.into(), series: Vec::new() };
            if families.insert(name.into(), parsed).is_some() {
                return Err(format!("{line}: the family occurs twice"));
            }
            current = name.into();
        } else {
            let (name, labels, value) = sample(line)?;
            let family = families.get_mut(&current).ok_or_else(|| format!("{line}: no family"))?;
            let suffix = name.strip_prefix(current.as_str()).ok_or_else(|| format!("{line}: not in {current}"))?;
            let allowed: &[&str] = if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            if !allowed.contains(&suffix) {
                return Err(format!("{line}: not a series of a {}", family.kind));
            }
            family.series.push((suffix.into(), labels, value));
        }
    }
    families.iter().try_for_each(|(name, family)| check(name, family))?;
    Ok(families)
}

/// Parses `name{label="value",...} number`.
fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let wrong = |what: &str| format!("{line}: {what}");
    let end = line.find(['{', ' ']).ok_or_else(|| wrong("no value"))?;
    let (name, mut rest) = line.split_at(end);
    let starts = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    if !name.starts_with(starts) || !name.chars().all(|c| starts(c) || c.is_ascii_digit()) {
        return Err(wrong("not a name"));
    }
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or_else(|| wrong("a label without a value"))?;
            if label.is_empty() || !label.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(wrong("not the name of a label"));
            }
            let (value, after) = quoted(after).ok_or_else(|| wrong("an unfinished or wrongly escaped value"))?;
            if labels.insert(label.into(), value).is_some() {
                return Err(wrong("a label twice"));
            }
            match after.strip_prefix(',') {
                Some(next) => rest = next,
                None => {
                    rest = after.strip_prefix('}').ok_or_else(|| wrong("no closing brace"))?;
                    break;
                }
            }
        }
    }
    let number = rest.strip_prefix(' ').ok_or_else(|| wrong("no space before the value"))?;
    if !number.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        return Err(wrong("not a number"));
    }
    Ok((name.into(), labels, number.parse().map_err(|_| wrong("not a number"))?))
}

/// Returns the unescaped text up to the closing quote, and what follows the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                c @ ('\\' | '"') => value.push(c),
                _ => return None,
            },
            '\n' => return None,
            c => value.push(c),
        }
    }
    None
}

/// Checks that no series occurs twice, that counters are not negative, and the parts of histograms.
fn check(name: &str, family: &Parsed) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let mut buckets: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    let mut counts: BTreeMap<Labels, f64> = BTreeMap::new();
    for (suffix, labels, value) in &family.series {
        if !seen.insert((suffix, labels)) {
            return Err(format!("{name}{suffix} {labels:?} occurs twice"));
        }
        if family.kind != "gauge" && *value < 0.0 {
            return Err(format!("{name}{suffix} {labels:?} is negative"));
        }
        let mut labels = labels.clone();
        match suffix.as_str() {
            "_bucket" => {
                let le = labels.remove("le").ok_or_else(|| format!("{name}: a bucket without le"))?;
                let bound = if le == "+Inf" { f64::INFINITY } else { le.parse().map_err(|_| format!("le {le}"))? };
                buckets.entry(labels).or_default().push((bound, *value));
            }
            "_count" => drop(counts.insert(labels, *value)),
            _ => {}
        }
    }
    for (labels, buckets) in &buckets {
        let rise = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let last = buckets.last().filter(|last| last.0.is_infinite() && counts.get(labels) == Some(&last.1));
        if !rise || last.is_none() {
            return Err(format!("{name} {labels:?}: buckets fall, or their total is not the count"));
        }
    }
    if buckets.len() == counts.len() { Ok(()) } else { Err(format!("{name}: a count without buckets")) }
}

/// Value of the only series of a family that has this suffix and these labels.
fn value(families: &BTreeMap<String, Parsed>, name: &str, suffix: &str, labels: &[(&str, &str)]) -> f64 {
    let has = |found: &Labels| labels.iter().all(|(label, value)| found.get(*label).is_some_and(|v| v == value));
    let family = families.get(name).unwrap_or_else(|| panic!("{name} is missing"));
    let found: Vec<f64> =
        family.series.iter().filter(|(s, l, _)| s == suffix && has(l)).map(|(_, _, value)| *value).collect();
    assert_eq!(found.len(), 1, "{name}{suffix} {labels:?}");
    found[0]
}

fn info(name: &str) -> ModelInfo {
    ModelInfo { name: name.into(), max_model_len: 2048, page_tokens: 128, pages: 64 }
}

/// Metrics of a model that has had each event at least once.
fn busy() -> Metrics {
    let metrics = Metrics::new();
    let model = metrics.add_model(&info("tiny"));
    let ms = Duration::from_millis;
    model.queue(3, 2);
    model.pages(10, 30, 24);
    model.request_admitted(100, 60);
    model.prefix(100, 60);
    model.first_token(ms(30));
    (0..9).for_each(|_| model.token(ms(4)));
    let times = RequestTimes { queue: ms(10), prefill: ms(20), decode: ms(36), total: ms(66) };
    model.request_finished(&times, FinishedReason::Stop, TokenCounts { prompt: 100, generated: 10 });
    let mut stages = Stages::default();
    stages.add(Stage::Mlp, ms(3));
    stages.add_counts(Stage::Mlp, &Counts { instructions: 70, cycles: 50, cache_misses: 0 });
    model.step(&StepRecord { prompt_tokens: 40, generated_tokens: 3, time: ms(5), stages: Some(&stages) });
    model.step(&StepRecord { prompt_tokens: 0, generated_tokens: 3, time: ms(4), stages: None });
    Rejection::ALL.iter().for_each(|reason| model.rejected(*reason));
    model.cancelled(Phase::Decode);
    model.preempted();
    let mut drafts = DraftCounts::default();
    [(Drafter::Layer, 3, 2), (Drafter::Layer, 4, 3), (Drafter::History, 2, 0)]
        .iter()
        .for_each(|(drafter, tokens, accepted)| drafts.count(*drafter, *tokens, *accepted));
    model.drafts(&drafts);
    model.disk_pages(DiskPages::Hit, 5);
    model.checked_tensor(true);
    model.lora(16, &["sql", "poems"], &["sql"]);
    metrics.key_tokens("alice", TokenKind::Prompt, 100);
    metrics.key_tokens("alice", TokenKind::Generated, 10);
    metrics.ignored_fields(2);
    metrics
}

#[test]
fn every_event_changes_its_series() {
    let families = parse(&busy().render()).unwrap();
    let model = [("model_name", "tiny"), ("engine", "0")];
    /// Family, suffix of the series, labels, value.
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], f64);
    let cases: &[Case<'_>] = &[
        ("vllm:num_requests_running", "", &[], 3.0),
        ("vllm:num_requests_waiting", "", &[], 2.0),
        ("vllm:kv_cache_usage_perc", "", &[], 30.0 / 64.0),
        ("vllm:gpu_cache_usage_perc", "", &[], 30.0 / 64.0),
        ("vllm:cache_config_info", "", &[("block_size", "128"), ("num_gpu_blocks", "64")], 1.0),
        ("vllm:prefix_cache_queries_total", "", &[], 100.0),
        ("vllm:prefix_cache_hits_total", "", &[], 60.0),
        ("vllm:gpu_prefix_cache_queries_total", "", &[], 100.0),
        ("vllm:gpu_prefix_cache_hits_total", "", &[], 60.0),
        ("vllm:prompt_tokens_total", "", &[], 100.0),
        ("vllm:prompt_tokens_cached_total", "", &[], 60.0),
        ("vllm:generation_tokens_total", "", &[], 6.0),
        ("vllm:num_preemptions_total", "", &[], 1.0),
        ("vllm:request_success_total", "", &[("finished_reason", "stop")], 1.0),
        ("vllm:request_success_total", "", &[("finished_reason", "abort")], 1.0),
        ("vllm:request_success_total", "", &[("finished_reason", "length")], 0.0),
        ("vllm:admission_rejections_total", "", &[("reason", "queue_timeout")], 1.0),
        ("vllm:time_to_first_token_seconds", "_bucket", &[("le", "0.02")], 0.0),
        ("vllm:time_to_first_token_seconds", "_bucket", &[("le", "0.04")], 1.0),
        ("vllm:inter_token_latency_seconds", "_bucket", &[("le", "0.005")], 9.0),
        ("vllm:inter_token_latency_seconds", "_sum", &[], 0.036),
        ("vllm:request_time_per_output_token_seconds", "_sum", &[], 0.004),
        ("vllm:e2e_request_latency_seconds", "_sum", &[], 0.066),
        ("vllm:request_queue_time_seconds", "_sum", &[], 0.01),
        ("vllm:request_prefill_time_seconds", "_sum", &[], 0.02),
        ("vllm:request_decode_time_seconds", "_sum", &[], 0.036),
        ("vllm:request_prompt_tokens", "_bucket", &[("le", "100.0")], 1.0),
        ("vllm:request_prompt_tokens", "_bucket", &[("le", "50.0")], 0.0),
        ("vllm:request_generation_tokens", "_sum", &[], 10.0),
        ("vllm:iteration_tokens_total", "_bucket", &[("le", "8.0")], 1.0),
        ("iec_step_seconds", "_count", &[("stage", "total")], 2.0),
        ("iec_step_seconds", "_sum", &[("stage", "mlp")], 0.003),
        ("iec_stage_events_total", "", &[("stage", "mlp"), ("event", "instructions")], 70.0),
        ("iec_stage_events_total", "", &[("stage", "mlp"), ("event", "cycles")], 50.0),
        ("iec_kv_pages", "", &[("state", "free")], 10.0),
        ("iec_kv_pages", "", &[("state", "cached")], 24.0),
        ("iec_cancelled_total", "", &[("phase", "decode")], 1.0),
        ("iec_cancelled_total", "", &[("phase", "queued")], 0.0),
        ("iec_disk_pages_total", "", &[("result", "hit")], 5.0),
        ("iec_checked_tensors_total", "", &[("result", "same")], 1.0),
        ("vllm:spec_decode_num_drafts_total", "", &[("drafter", "mtp")], 2.0),
        ("vllm:spec_decode_num_draft_tokens_total", "", &[("drafter", "ngram")], 2.0),
        ("vllm:spec_decode_num_draft_tokens_total", "", &[("drafter", "draft")], 0.0),
        ("vllm:spec_decode_num_accepted_tokens_total", "", &[("drafter", "mtp")], 5.0),
    ];
    for (name, suffix, labels, expected) in cases {
        let found = value(&families, name, suffix, &[&model[..], labels].concat());
        assert!((found - expected).abs() < 1e-9, "{name}{suffix} {labels:?}: {found}, expected {expected}");
    }
    assert_eq!(value(&families, "iec_key_tokens_total", "", &[("key", "alice"), ("kind", "generated")]), 10.0);
    assert_eq!(value(&families, "iec_ignored_fields_total", "", &[]), 2.0);
    assert_eq!(families["iec_step_seconds"].kind, "histogram");
}

#[test]
fn each_name_of_the_contract_is_written() {
    let families = parse(&busy().render()).unwrap();
    let own = FAMILIES.iter().map(|family| family.name);
    let process = ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"];
    let more = ["process_open_fds", "process_max_fds", "process_page_faults_total", "process_context_switches_total"];
    for name in own.chain(process).chain(more).chain(["iec_key_tokens_total", "iec_build_info"]) {
        assert!(families.get(name).is_some_and(|family| !family.series.is_empty()), "{name} is missing");
    }
    assert!(value(&families, "process_resident_memory_bytes", "", &[]) > 1e6);
    assert!(value(&families, "process_start_time_seconds", "", &[]) > 1.7e9);
    assert!(value(&families, "process_open_fds", "", &[]) >= 3.0);
}

#[test]
fn the_dashboard_uses_only_names_that_are_written() {
    let dashboard: serde_json::Value = serde_json::from_str(include_str!("../../../dashboards/iec.json")).unwrap();
    let families = parse(&busy().render()).unwrap();
    let (names, mut used) = (regex::Regex::new(r"\b(vllm:|iec_|process_)\w+").unwrap(), BTreeSet::new());
    for target in
        dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array()).flatten()
    {
        for name in names.find_iter(target["expr"].as_str().unwrap()).map(|found| found.as_str()) {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let family = base.filter(|base| families.get(*base).is_some_and(|family| family.kind == "histogram"));
            assert!(families.contains_key(family.unwrap_or(name)), "{name} is not exported");
            used.insert(family.unwrap_or(name).to_string());
        }
    }
    let unused: Vec<&String> = families.keys().filter(|name| !used.contains(*name)).collect();
    // Older names, a constant, and events that few virtual machines count.
    let left_out = |name: &str| name.contains("gpu_") || ["process_max_fds", "iec_stage_events_total"].contains(&name);
    assert!(unused.iter().all(|name| left_out(name)), "no panel shows {unused:?}");
}

#[test]
fn the_series_of_adapters_exists_only_with_its_latest_labels() {
    let metrics = Metrics::new();
    let model = metrics.add_model(&info("tiny"));
    assert!(!parse(&metrics.render()).unwrap().contains_key("vllm:lora_requests_info"));
    model.lora(4, &["a"], &["b", "c"]);
    model.lora(4, &[], &["c"]);
    let families = parse(&metrics.render()).unwrap();
    assert_eq!(families["vllm:lora_requests_info"].series.len(), 1);
    let labels = [("max_lora", "4"), ("running_lora_adapters", ""), ("waiting_lora_adapters", "c")];
    assert!(value(&families, "vllm:lora_requests_info", "", &labels) > 1.7e9);
}

#[test]
fn models_share_families_and_vanish_when_removed() {
    let metrics = Metrics::new();
    let first = metrics.add_model(&info("one"));
    metrics.add_model(&info("two")).queue(7, 0);
    first.queue(5, 0);
    let again = metrics.add_model(&ModelInfo { pages: 32, ..info("one") });
    assert!(Arc::ptr_eq(&first, &again), "a model that is opened again keeps its counts");
    let families = parse(&metrics.render()).unwrap();
    assert_eq!(value(&families, "vllm:num_requests_running", "", &[("model_name", "one")]), 5.0);
    assert_eq!(value(&families, "vllm:num_requests_running", "", &[("model_name", "two")]), 7.0);
    value(&families, "vllm:cache_config_info", "", &[("model_name", "one"), ("num_gpu_blocks", "32")]);
    metrics.remove_model("one");
    let text = metrics.render();
    assert!(parse(&text).is_ok() && !text.contains("\"one\"") && text.contains("\"two\""));
}

#[test]
fn keys_above_the_limit_are_counted_together() {
    let metrics = Metrics::new();
    (0..MOST_KEYS + 5).for_each(|i| metrics.key_tokens(&format!("key{i}"), TokenKind::Prompt, 2));
    metrics.key_tokens("key3", TokenKind::Prompt, u64::MAX);
    let families = parse(&metrics.render()).unwrap();
    let tokens = |key: &str| value(&families, "iec_key_tokens_total", "", &[("key", key), ("kind", "prompt")]);
    assert_eq!((tokens("key0"), tokens(OTHER_KEYS), tokens("key3")), (2.0, 10.0, u64::MAX as f64));
    metrics.retain_keys(|key| key == "key0");
    let series = &parse(&metrics.render()).unwrap()["iec_key_tokens_total"].series;
    assert_eq!(series.len(), 2 * TokenKind::ALL.len(), "key0 and the others");
}

#[test]
fn a_request_of_one_token_has_no_time_per_further_token() {
    let metrics = Metrics::new();
    let model = metrics.add_model(&info("tiny"));
    for generated in [0, 1] {
        let tokens = TokenCounts { prompt: 1, generated };
        model.request_finished(&RequestTimes::default(), FinishedReason::Length, tokens);
    }
    let families = parse(&metrics.render()).unwrap();
    assert_eq!(value(&families, "vllm:request_time_per_output_token_seconds", "_count", &[]), 0.0);
    assert_eq!(value(&families, "vllm:request_success_total", "", &[("finished_reason", "length")]), 2.0);
}

#[test]
fn the_text_is_consistent_while_other_threads_record() {
    let metrics = Metrics::new();
    let model = metrics.add_model(&info("tiny"));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..20_000).for_each(|i| model.token(Duration::from_micros(i))));
        }
        (0..20).for_each(|_| drop(parse(&metrics.render()).unwrap()));
    });
    let families = parse(&metrics.render()).unwrap();
    assert_eq!(value(&families, "vllm:inter_token_latency_seconds", "_count", &[]), 40_000.0);
}

#[test]
fn the_strict_parser_refuses_broken_texts() {
    let head = "# HELP a b\n# TYPE a counter\n";
    let histogram = "# HELP a b\n# TYPE a histogram\n";
    let cases = [
        format!("{head}a 1"),
        "a 1\n".into(),
        "# TYPE a counter\na 1\n".into(),
        format!("{head}a 1\na 2\n"),
        format!("{head}a -1\n"),
        format!("{head}b 1\n"),
        format!("{head}a{{b=\"c\\d\"}} 1\n"),
        format!("{head}a{{b=\"c}} 1\n"),
        format!("{head}a one\n"),
        format!("{head}{head}a 1\n"),
        format!("{histogram}a_bucket{{le=\"1\"}} 1\na_sum 1\na_count 1\n"),
        format!("{histogram}a_bucket{{le=\"1\"}} 2\na_bucket{{le=\"+Inf\"}} 1\na_sum 1\na_count 1\n"),
        format!("{histogram}a_bucket{{le=\"+Inf\"}} 1\na_sum 1\na_count 2\n"),
    ];
    for case in cases {
        assert!(parse(&case).is_err(), "{case}");
    }
    assert!(parse(&format!("{head}a 1\n")).is_ok());
}

proptest! {
    #[test]
    fn labels_and_help_survive_the_text(
        label in any::<String>(),
        other in "[\"\\\\\nxn]{0,12}",
        help in "[ -~\n]{1,20}",
    ) {
        let mut text = MetricsText::default();
        text.family("a_total", MetricKind::Counter, &help);
        text.value(&[("x", &label), ("y", &other)], 7);
        let text = text.finish();
        let families = parse(&text).map_err(TestCaseError::fail)?;
        let (_, labels, number) = &families["a_total"].series[0];
        prop_assert_eq!((&labels["x"], &labels["y"], *number), (&label, &other, 7.0));
    }
}
