//! Serves the metrics of a made-up server with two models: `cargo run --release --example metrics -- 9200`.
//!
//! Each scrape adds the events of a moment, so that all rates and quantiles of `dashboards/iec.json` have values.
//! `scripts/check-dashboard.sh http://127.0.0.1:9200/metrics` runs the queries of the dashboard on it.

use iec::generate::speculate::{DraftCounts, Drafter};
use iec::host::metrics::{
    CONTENT_TYPE, DiskPages, FinishedReason, Metrics, ModelInfo, ModelMetrics, Phase, Rejection, RequestTimes,
    StepRecord, TokenCounts, TokenKind,
};
use iec::runtime::{Stage, Stages};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).map_or(Ok(0), |port| port.parse())?;
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    writeln!(std::io::stdout(), "http://{}/metrics", listener.local_addr()?)?;
    let metrics = Metrics::new();
    let info = |name: &str| ModelInfo { name: name.into(), max_model_len: 8192, page_tokens: 128, pages: 512 };
    let models = [metrics.add_model(&info("qwen3-4b")), metrics.add_model(&info("tinyllama"))];
    for (moment, connection) in listener.incoming().enumerate() {
        models.iter().for_each(|model| record(model, moment));
        metrics.key_tokens("alice", TokenKind::Prompt, 300);
        metrics.key_tokens("alice", TokenKind::Cached, 200);
        metrics.key_tokens("alice", TokenKind::Generated, 64);
        metrics.ignored_fields(1);
        let body = metrics.render();
        let mut connection = connection?;
        connection.set_read_timeout(Some(Duration::from_secs(1)))?;
        let _ = connection.read(&mut [0; 4096])?;
        let length = body.len();
        write!(
            connection,
            "HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n\
             {body}"
        )?;
    }
    Ok(())
}

/// Records one request and its steps.
fn record(model: &ModelMetrics, moment: usize) {
    let ms = |n: usize| Duration::from_millis(n as u64);
    let wait = 5 + moment % 7 * 20;
    model.queue(3 + moment % 5, moment % 4);
    model.pages(200, 250 + moment % 30, 32);
    model.request_admitted(300, 200);
    model.prefix(300, 200);
    model.first_token(ms(wait + 80));
    (0..63).for_each(|i| model.token(ms(18 + i % 9)));
    let mut stages = Stages::default();
    stages.add(Stage::Projections, ms(6));
    stages.add(Stage::Mlp, ms(11));
    stages.add(Stage::Attention, ms(3));
    for step in 0..64 {
        let prompt_tokens = if step == 0 { 100 } else { 0 };
        model.step(&StepRecord { prompt_tokens, generated_tokens: 1, time: ms(21), stages: Some(&stages) });
    }
    let times = RequestTimes { queue: ms(wait), prefill: ms(80), decode: ms(1400), total: ms(wait + 1480) };
    let reason = if moment.is_multiple_of(3) { FinishedReason::Length } else { FinishedReason::Stop };
    model.request_finished(&times, reason, TokenCounts { prompt: 300, generated: 64 });
    model.lora(16, &["sql", "poems"], &["sql"]);
    model.disk_pages(DiskPages::Hit, 2);
    let mut drafts = DraftCounts::default();
    (0..9).for_each(|_| drafts.count(Drafter::History, 5, 3));
    model.drafts(&drafts);
    if moment.is_multiple_of(5) {
        model.rejected(Rejection::QueueLength);
        model.cancelled(Phase::Decode);
        model.preempted();
    }
}
