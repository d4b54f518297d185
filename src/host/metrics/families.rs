//! Table of the metric families that exist once per model, in the order of the text.
//!
//! Names that begin with `vllm:` and their labels are those of vLLM, so that its dashboards, the model server protocol
//! of the Kubernetes Gateway API, and routers read them. Names that begin with `iec_` are our own.

use super::events::{DiskPages, FinishedReason, Phase, Rejection};
use super::histogram::Histogram;
use super::model::ModelMetrics;
use super::text::{Label, MetricKind, MetricsText};
use crate::generate::speculate::Drafter;
use MetricKind::{Counter, Gauge};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

/// Metric family with one or several series per model.
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) help: &'static str,
    /// Writes the series of a model.
    pub(super) write: fn(&ModelMetrics, &mut Series<'_>),
}

/// Place where the series of one model are written.
pub(super) struct Series<'a> {
    text: &'a mut MetricsText,
    model: &'a str,
}

impl<'a> Series<'a> {
    pub(super) fn new(text: &'a mut MetricsText, model: &'a str) -> Series<'a> {
        Series { text, model }
    }

    fn value(&mut self, more: &[Label<'_>], value: impl std::fmt::Display) {
        self.text.value(&[&[("model_name", self.model), ("engine", "0")], more].concat(), value);
    }

    fn count(&mut self, count: &AtomicU64) {
        self.value(&[], count.load(Ordering::Relaxed));
    }

    fn histogram(&mut self, more: &[Label<'_>], histogram: &Histogram) {
        self.text.histogram(&[&[("model_name", self.model), ("engine", "0")], more].concat(), histogram);
    }

    /// Writes one series per value of a label, those that are zero too: a rate needs a first value.
    fn counts<'b>(&mut self, label: &str, counts: impl Iterator<Item = (&'static str, &'b AtomicU64)>) {
        for (name, count) in counts {
            self.value(&[(label, name)], count.load(Ordering::Relaxed));
        }
    }
}

/// Returns the row of a family.
const fn row(
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    write: fn(&ModelMetrics, &mut Series<'_>),
) -> Family {
    Family { name, kind, help, write }
}

/// All families with the label `model_name`.
pub(super) const FAMILIES: &[Family] = &[
    row("vllm:num_requests_running", Gauge, "Requests in the batch.", |m, out| out.count(&m.running)),
    row("vllm:num_requests_waiting", Gauge, "Requests that wait for a place in the batch.", |m, out| {
        out.count(&m.waiting);
    }),
    row("vllm:kv_cache_usage_perc", Gauge, "Share of the KV cache that running requests hold; 1 is all of it.", usage),
    row("vllm:gpu_cache_usage_perc", Gauge, "Older name of vllm:kv_cache_usage_perc.", usage),
    row("vllm:cache_config_info", Gauge, "Positions of a page of the KV cache, and number of pages; always 1.", pages),
    row("vllm:prefix_cache_queries_total", Counter, "Tokens that were looked up in the prefix cache.", |m, out| {
        out.count(&m.prefix_queries);
    }),
    row("vllm:prefix_cache_hits_total", Counter, "Tokens that were found in the prefix cache.", |m, out| {
        out.count(&m.prefix_hits);
    }),
    row("vllm:gpu_prefix_cache_queries_total", Counter, "Older name of vllm:prefix_cache_queries_total.", |m, out| {
        out.count(&m.prefix_queries);
    }),
    row("vllm:gpu_prefix_cache_hits_total", Counter, "Older name of vllm:prefix_cache_hits_total.", |m, out| {
        out.count(&m.prefix_hits);
    }),
    row("vllm:prompt_tokens_total", Counter, "Prompt tokens of admitted requests, cached ones included.", |m, out| {
        out.count(&m.prompt_tokens);
    }),
    row("vllm:prompt_tokens_cached_total", Counter, "Prompt tokens that came from the prefix cache.", |m, out| {
        out.count(&m.cached_tokens);
    }),
    row("vllm:generation_tokens_total", Counter, "Generated tokens.", |m, out| out.count(&m.generated_tokens)),
    row("vllm:num_preemptions_total", Counter, "Requests that gave up their pages and waited again.", |m, out| {
        out.count(&m.preemptions);
    }),
    row("vllm:spec_decode_num_drafts_total", Counter, "Drafts of one or more tokens that were verified.", |m, out| {
        out.counts("drafter", Drafter::ALL.iter().map(|drafter| drafter.name()).zip(&m.drafts[0]));
    }),
    row("vllm:spec_decode_num_draft_tokens_total", Counter, "Tokens of these drafts.", |m, out| {
        out.counts("drafter", Drafter::ALL.iter().map(|drafter| drafter.name()).zip(&m.drafts[1]));
    }),
    row("vllm:spec_decode_num_accepted_tokens_total", Counter, "Draft tokens that were accepted.", |m, out| {
        out.counts("drafter", Drafter::ALL.iter().map(|drafter| drafter.name()).zip(&m.drafts[2]));
    }),
    row("vllm:request_success_total", Counter, "Requests that ended, by reason.", |m, out| {
        out.counts("finished_reason", FinishedReason::ALL.iter().map(|reason| reason.name()).zip(&m.finished));
    }),
    row("vllm:admission_rejections_total", Counter, "Requests that were not admitted, by reason.", |m, out| {
        out.counts("reason", Rejection::ALL.iter().map(|reason| reason.name()).zip(&m.rejections));
    }),
    row(
        "vllm:lora_requests_info",
        Gauge,
        "Adapters of running and waiting requests; the value is Unix time.",
        adapters,
    ),
    row(
        "vllm:time_to_first_token_seconds",
        MetricKind::Histogram,
        "Time from arrival to the first token.",
        |m, out| {
            out.histogram(&[], &m.first_token);
        },
    ),
    row("vllm:inter_token_latency_seconds", MetricKind::Histogram, "Time between tokens of an answer.", |m, out| {
        out.histogram(&[], &m.between_tokens);
    }),
    row(
        "vllm:request_time_per_output_token_seconds",
        MetricKind::Histogram,
        "Decode time of a request divided by the tokens after its first.",
        |m, out| out.histogram(&[], &m.per_output_token),
    ),
    row(
        "vllm:e2e_request_latency_seconds",
        MetricKind::Histogram,
        "Time from arrival to the end of a request.",
        |m, out| {
            out.histogram(&[], &m.total);
        },
    ),
    row("vllm:request_queue_time_seconds", MetricKind::Histogram, "Time from arrival to admission.", |m, out| {
        out.histogram(&[], &m.queue);
    }),
    row(
        "vllm:request_prefill_time_seconds",
        MetricKind::Histogram,
        "Time from admission to the first token.",
        |m, out| {
            out.histogram(&[], &m.prefill);
        },
    ),
    row(
        "vllm:request_decode_time_seconds",
        MetricKind::Histogram,
        "Time from the first token to the last.",
        |m, out| {
            out.histogram(&[], &m.decode);
        },
    ),
    row("vllm:request_prompt_tokens", MetricKind::Histogram, "Prompt tokens of a request.", |m, out| {
        out.histogram(&[], &m.request_prompt_tokens);
    }),
    row("vllm:request_generation_tokens", MetricKind::Histogram, "Generated tokens of a request.", |m, out| {
        out.histogram(&[], &m.request_generated_tokens);
    }),
    row("vllm:iteration_tokens_total", MetricKind::Histogram, "Prompt and generated tokens of a step.", |m, out| {
        out.histogram(&[], &m.step_tokens);
    }),
    row("iec_step_seconds", MetricKind::Histogram, "Time of a step of the engine, and of its stages.", steps),
    row(
        "iec_stage_events_total",
        Counter,
        "Hardware events of the thread that drives the engine, by stage, where the system lets them be counted.",
        stage_events,
    ),
    row("iec_kv_pages", Gauge, "Pages of the KV cache, by state.", |m, out| {
        out.counts(
            "state",
            ["free", "used", "cached"].into_iter().zip([&m.pages_free, &m.pages_used, &m.pages_cached]),
        );
    }),
    row("iec_cancelled_total", Counter, "Requests that their clients cancelled, by phase.", |m, out| {
        out.counts("phase", Phase::ALL.iter().map(|phase| phase.name()).zip(&m.cancelled));
    }),
    row("iec_disk_pages_total", Counter, "Pages of the prefix cache on disk, by what happened to them.", |m, out| {
        out.counts("result", DiskPages::ALL.iter().map(|result| result.name()).zip(&m.disk_pages));
    }),
    row(
        "iec_checked_tensors_total",
        Counter,
        "Tensors that were compared with their hashes while serving.",
        |m, out| {
            out.counts("result", ["same", "different"].into_iter().zip(&m.checked_tensors));
        },
    ),
];

fn usage(model: &ModelMetrics, out: &mut Series<'_>) {
    let [free, used, cached] =
        [&model.pages_free, &model.pages_used, &model.pages_cached].map(|pages| pages.load(Ordering::Relaxed) as f64);
    out.value(&[], used / (free + used + cached).max(1.0));
}

fn pages(model: &ModelMetrics, out: &mut Series<'_>) {
    let [size, number] = [&model.page_tokens, &model.pages_total].map(|n| n.load(Ordering::Relaxed).to_string());
    out.value(&[("block_size", &size), ("num_gpu_blocks", &number)], 1);
}

fn adapters(model: &ModelMetrics, out: &mut Series<'_>) {
    let sets = model.adapters.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(sets) = sets {
        let max = sets.max.to_string();
        let names = [
            ("max_lora", max.as_str()),
            ("running_lora_adapters", &sets.running),
            ("waiting_lora_adapters", &sets.waiting),
        ];
        out.value(&names, sets.time);
    }
}

fn stage_events(model: &ModelMetrics, out: &mut Series<'_>) {
    for ((stage, _), events) in model.stages.iter().zip(&model.stage_events) {
        for (event, count) in events.named() {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                out.value(&[("stage", stage), ("event", event)], count);
            }
        }
    }
}

fn steps(model: &ModelMetrics, out: &mut Series<'_>) {
    out.histogram(&[("stage", "total")], &model.step);
    for (stage, histogram) in model.stages.iter().filter(|(_, histogram)| !histogram.is_empty()) {
        out.histogram(&[("stage", stage)], histogram);
    }
}
