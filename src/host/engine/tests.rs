//! Failures of the engine: its requests end, and the model is opened again.

use super::*;
use crate::generate::Request;
use crate::host::model::{Arrival, Served, Ticket};
use crate::host::reply::{Refusal, Reply};
use crate::host::turns::Turns;
use crate::models::embedded;
use crate::sched::KeyLimits;
use crate::session::SessionOptions;
use std::sync::mpsc::channel;

fn shared() -> Shared {
    Shared {
        shows_prompts: false,
        process_ends: false,
        slow_reader: None,
        turns: Turns::new(1),
        metrics: Arc::new(Metrics::new()),
        limits: sched::Options::with_pages(0, 0),
        prefix_cache: true,
        max_adapters: 1,
        log: Arc::new(|_| {}),
        check_weights: false,
        record_use: None,
        state: None,
    }
}

fn ask(model: &Model, max_new: usize) -> Ticket {
    let ids = vec![1, 403, 407];
    let request = Request { ids, max_new, seed: Some(1), ..Request::default() };
    model.submit(|ticket, outlet| Arrival {
        ticket,
        choices: vec![request],
        key: 0,
        key_name: "default".into(),
        adapters: Vec::new(),
        deadline: None,
        arrived: Instant::now(),
        outlet,
    })
}

/// Waits for the end of a request, and returns its tokens or the reason why it was refused.
fn end(mut ticket: Ticket) -> std::result::Result<usize, String> {
    loop {
        match ticket.inlet.wait() {
            Some(Reply::Done(done)) => return Ok(done.completion.ids.len()),
            Some(Reply::Refused(Refusal::Stopped(why))) => return Err(why),
            Some(Reply::Refused(refusal)) => return Err(format!("{refusal:?}")),
            Some(_) => {}
            None => return Err("the channel was closed".into()),
        }
    }
}

#[test]
fn a_panic_ends_the_requests_of_a_step_and_the_model_is_opened_again() {
    let home = tempfile::tempdir().unwrap();
    let pack = embedded::pack_into(home.path()).unwrap();
    let open: crate::host::model::Open = Box::new(move || Session::open(&pack, &SessionOptions::default()));
    let (model, commands) = Model::new(
        0,
        Served { name: "embedded".into(), open, template: TemplateChoice::Auto, plan: None, on_request: false },
        false,
    );
    let model = Arc::new(model);
    let (sender, ended) = channel();
    let thread = {
        let model = model.clone();
        std::thread::spawn(move || {
            let mut usage = UsageOf::new();
            let _ = sender.send((work(&model, &commands, &shared(), &mut usage).map_err(|e| e.to_string()), usage));
        })
    };
    model.send(Command::Keys(vec![KeyChange::Add(KeyLimits::default())]));
    // A client loaded two adapters; the files of one are gone when the model is opened again.
    let fixture = concat!("kept=", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lora-llama-gqa/r8-qv");
    model.set_adapters(vec!["gone=/no/such/directory".parse().unwrap(), fixture.parse().unwrap()]);
    for failure in 1..=MOST_FAILURES {
        assert_eq!(end(ask(&model, 5)), Ok(5), "before failure {failure}");
        let names = model.encode_and_wait(|encoder| encoder.adapters().names());
        assert_eq!(names, Some(vec!["kept".to_string()]));
        let unlucky = ask(&model, 400);
        model.send(Command::Panic);
        assert!(end(unlucky).unwrap_err().contains("failed"));
    }
    let (result, usage) = ended.recv().unwrap();
    thread.join().unwrap();
    assert!(result.unwrap_err().contains("failed 3 times"));
    let used = usage[0].as_ref().unwrap();
    assert!(used.generated_tokens >= 15, "the use of keys survives failures: {used:?}");
}
