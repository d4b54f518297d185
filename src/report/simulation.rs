//! Shows the results of a simulation of the scheduler: a table, JSON, and an HTML page with charts.

use super::html::charts::{Bar, bars, lines};
use super::html::{self, Page, number, section};
use super::table::Table;
use crate::sched::sim::{Histogram, KeyResults, Lengths, Load, Results, SERIES, Setup};
use crate::units::percentage;
use serde_json::{Value, json};

/// Largest number of keys in tables and charts.
const MOST_KEYS: usize = 20;

/// Shares whose quantiles are shown.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// Returns the histograms of times with their names.
fn times(results: &Results) -> [(&'static str, &'static str, &Histogram); 4] {
    [
        ("waiting until admission", "wait_s", &results.wait),
        ("time to first token", "ttft_s", &results.first_token),
        ("gap between tokens", "gap_s", &results.gap),
        ("whole answer", "latency_s", &results.latency),
    ]
}

/// Divides, and returns 0 for an empty total.
fn share(part: f64, total: f64) -> f64 {
    if total > 0.0 { part / total } else { 0.0 }
}

/// Returns the table of times in seconds.
pub fn table(results: &Results) -> Table {
    let mut table = Table::new(&["seconds", ">mean", ">p50", ">p90", ">p99", ">p99.9", ">largest"]);
    for (name, _, times) in times(results) {
        let quantiles = QUANTILES.iter().map(|(_, share)| times.quantile(*share));
        let cells = [times.mean()].into_iter().chain(quantiles).chain([times.largest()]);
        table.row([name.to_string()].into_iter().chain(cells.map(|time| format!("{time:.3}"))));
    }
    table
}

/// Returns a summary in words.
pub fn summary(results: &Results) -> String {
    let ends: Vec<String> = results.ends.iter().map(|(end, count)| format!("{count} {end}")).collect();
    let busy = 100.0 * share(results.busy, results.seconds);
    let cached = 100.0 * share(results.cached as f64, results.prompt_tokens as f64);
    format!(
        "{} requests in {:.0} simulated seconds: {}\nengine busy {busy:.0} % of the time; {} answer tokens ({:.1}/s), \
         {cached:.0} % of the prompt tokens from the prefix cache, {} preemptions, at most {} waiting",
        results.requests,
        results.seconds,
        ends.join(", "),
        results.generated,
        share(results.generated as f64, results.seconds),
        results.preemptions,
        results.most_waiting,
    )
}

/// Returns the results as JSON.
pub fn json(results: &Results) -> Value {
    let quantiles = |times: &Histogram| {
        let quantiles = QUANTILES.iter().map(|(name, share)| ((*name).to_string(), json!(times.quantile(*share))));
        let mut object: serde_json::Map<String, Value> = quantiles.collect();
        object.insert("mean".into(), json!(times.mean()));
        object.insert("max".into(), json!(times.largest()));
        object.insert("count".into(), json!(times.count()));
        Value::Object(object)
    };
    let key = |(number, key): (usize, &KeyResults)| {
        json!({"key": number, "requests": key.requests, "completed": key.completed, "refused": key.refused,
            "tokens": key.tokens, "wait_s": quantiles(&key.wait), "ttft_s": quantiles(&key.first_token)})
    };
    let mut object = json!({
        "requests": results.requests,
        "ends": results.ends,
        "simulated_s": results.seconds,
        "busy_s": results.busy,
        "steps": results.steps,
        "preemptions": results.preemptions,
        "prompt_tokens": results.prompt_tokens,
        "cached_tokens": results.cached,
        "computed_tokens": results.computed,
        "generated_tokens": results.generated,
        "most_waiting": results.most_waiting,
        "trace": format!("{:016x}", results.trace),
    });
    times(results).into_iter().for_each(|(_, name, times)| object[name] = quantiles(times));
    object["keys"] = results.keys.iter().enumerate().map(key).collect();
    object
}

/// Returns the HTML page.
pub fn page(setup: &Setup, results: &Results) -> String {
    let body = [
        tiles(results),
        section("Queue and batch over time", &curves(results, &[(2, 0), (4, 1)])),
        section("Pages of the KV cache over time", &curves(results, &[(0, 2), (5, 3), (3, 4)])),
        section("Times", &quantiles(results)),
        section("Ends of requests", &ends(results)),
        section("Fairness between keys", &keys(results)),
        section("Setup", &setup_table(setup)),
    ];
    let requests = format!("{} requests", results.requests);
    html::document(&Page {
        command: "simulate",
        title: "Simulation of the scheduler",
        facts: &[&requests, &format!("seed {}", setup.seed), &format!("trace {:016x}", results.trace)],
        body: &body.concat(),
        footer: "Times are simulated with the step costs of the setup; measure them with iec bench on your machine.",
    })
}

fn tiles(results: &Results) -> String {
    let tile = |value: String, text: &str| format!("<div><b>{value}</b><br>{text}</div>");
    let percent = percentage;
    let tiles = [
        tile(percent(results.completed() as f64, results.requests as f64), "answered completely"),
        tile(percent(results.busy, results.seconds), "engine busy"),
        tile(number(share(results.generated as f64, results.seconds)), "answer tokens/s"),
        tile(format!("{} s", number(results.first_token.quantile(0.99))), "p99 to first token"),
        tile(percent(results.cached as f64, results.prompt_tokens as f64), "of prompts cached"),
        tile(results.preemptions.to_string(), "preemptions"),
    ];
    format!("<div class=\"tiles\">{}</div>\n", tiles.concat())
}

/// Draws series, each with the number of its color.
fn curves(results: &Results, shown: &[(usize, usize)]) -> String {
    let curve = |(color, series): &(usize, usize)| (*color, SERIES[*series], results.series.means(*series));
    lines(&shown.iter().map(curve).collect::<Vec<_>>(), results.series.seconds(), "s")
}

fn quantiles(results: &Results) -> String {
    let row = |(name, _, times): (&str, &str, &Histogram)| {
        let time = |share| format!("{:.3}", times.quantile(share));
        let [p50, p90, p99, p999] = QUANTILES.map(|(_, share)| time(share));
        [name.to_string(), format!("{:.3}", times.mean()), p50, p90, p99, p999, format!("{:.3}", times.largest())]
    };
    let head = ["seconds", "mean", "p50", "p90", "p99", "p99.9", "largest"];
    html::table(&head, times(results).into_iter().map(row))
}

fn ends(results: &Results) -> String {
    let total = results.requests as f64;
    let bar = |(end, count): (&&str, &u64)| {
        let note = format!("{end}: {count}, {}", percentage(*count as f64, total));
        Bar { label: end.replace('_', " "), value: *count as f64, note }
    };
    bars(&results.ends.iter().map(bar).collect::<Vec<_>>(), |count| format!("{count:.0}"))
}

fn keys(results: &Results) -> String {
    let shown = || results.keys.iter().enumerate().take(MOST_KEYS);
    let bar = |(number, key): (usize, &KeyResults)| {
        let wait = key.wait.quantile(0.5);
        Bar { label: format!("key {number}: p50 waiting"), value: wait, note: format!("{wait:.3} s") }
    };
    let row = |(number, key): (usize, &KeyResults)| {
        let time = |time: f64| format!("{time:.3}");
        let counts = [number as u64, key.requests, key.completed, key.refused, key.tokens].map(|n| n.to_string());
        let [number, requests, completed, refused, tokens] = counts;
        let [wait, late, first] = [key.wait.quantile(0.5), key.wait.quantile(0.99), key.first_token.quantile(0.99)];
        [number, requests, completed, refused, tokens, time(wait), time(late), time(first)]
    };
    let head = ["key", "requests", "completed", "refused", "tokens", "wait p50, s", "wait p99, s", "TTFT p99, s"];
    let chart = bars(&shown().map(bar).collect::<Vec<_>>(), |wait| format!("{wait:.2} s"));
    let note = match results.keys.len() {
        0..=MOST_KEYS => String::new(),
        count => format!("<p>The first {MOST_KEYS} of {count} keys.</p>\n"),
    };
    note + &chart + &html::table(&head, shown().map(row))
}

/// Describes when requests arrive.
fn arrivals(load: &Load) -> String {
    let bursts = load.bursts.map_or_else(
        || "at any time".to_string(),
        |(on, off)| format!("in bursts of {} s with pauses of {} s", number(on), number(off)),
    );
    format!("{} requests/s, {bursts}", load.rate)
}

fn setup_table(setup: &Setup) -> String {
    let (options, load, machine) = (&setup.options, &setup.load, &setup.machine);
    let steps: Vec<String> =
        machine.steps.iter().map(|(rows, time)| format!("{:.1} ms for {rows}", *time as f64 / 1e3)).collect();
    let row = |name: &str, value: String| [name.to_string(), value];
    let seconds = |time: u64| format!("{} s", number(time as f64 / 1e6));
    let lengths = |lengths: Lengths| format!("median {}, sigma {}", lengths.median, lengths.sigma);
    let rows = [
        row("batch", format!("{} sequences, {} tokens per step", options.max_seqs, options.max_step_tokens)),
        row("step time", seconds(options.step)),
        row("queue", format!("{} requests, timeout {}", options.max_queue, seconds(options.queue_timeout))),
        row("aging", seconds(options.aging)),
        row("KV cache", format!("{} pages of 128 positions, context {}", options.pages, options.ctx)),
        row("arrivals", arrivals(load)),
        row("keys", format!("{}, Zipf exponent {}, flood {}", load.keys, load.zipf, load.flood)),
        row("prompts", format!("{}, {} heads of {} tokens", lengths(load.prompt), load.heads, load.head_tokens)),
        row("answers", format!("{}, at most {}", lengths(load.answer), load.max_tokens)),
        row("clients", format!("disconnects {}, slow readers {}", load.disconnects, load.slow_readers)),
        row("prefill", format!("{} tokens/s", machine.prefill_rate)),
        row("step", steps.join(", ")),
    ];
    html::table(&["setting", "value"], rows.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::sim::{Machine, simulate};
    use crate::sched::{KeyLimits, Options};

    fn setup(requests: u64) -> Setup {
        let lengths = Lengths { median: 100.0, sigma: 0.5 };
        let load = Load {
            requests,
            rate: 5.0,
            bursts: None,
            keys: 30,
            zipf: 1.1,
            flood: 0.0,
            background: 0.0,
            prompt: lengths,
            answer: lengths,
            max_tokens: 200,
            heads: 0,
            head_tokens: 0,
            adapters: 1,
            giants: 0.0,
            disconnects: 0.0,
            slow_readers: 0.0,
        };
        let machine = Machine { prefill_rate: 2000.0, steps: vec![(1, 5500), (9, 9500)], acceptance: 0.0 };
        Setup {
            options: Options::with_pages(200, 2048),
            key: KeyLimits::default(),
            load,
            machine,
            key_changes: None,
            seed: 3,
        }
    }

    #[test]
    fn the_page_shows_queue_pages_times_and_keys() {
        let setup = setup(500);
        let results = simulate(&setup, &|| false).unwrap();
        let page = page(&setup, &results);
        for text in ["Queue and batch", "free pages", "gap between tokens", "The first 20 of 30 keys", "seed 3"] {
            assert!(page.contains(text), "{text}");
        }
        assert_eq!(page.matches("<polyline").count(), 5);
        let json = json(&results);
        assert_eq!((json["requests"].as_u64(), json["ttft_s"]["count"].as_u64()), (Some(500), Some(500)));
        assert!(table(&results).to_string().contains("time to first token"));
        assert!(summary(&results).starts_with("500 requests in "));
    }

    #[test]
    fn a_simulation_without_requests_has_a_page_without_nan() {
        let setup = setup(0);
        let page = page(&setup, &simulate(&setup, &|| false).unwrap());
        assert!(!page.contains("NaN") && !page.contains("inf "));
    }
}
