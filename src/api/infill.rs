//! `/infill`: fills the gap between two texts, in the API of llama.cpp's server.

use super::answer::{Usage, failure};
use super::body::{Body, Prompts, expected};
use super::error::{ApiError, ApiResult};
use super::form::{Events, Form};
use super::job::{Job, Named};
use super::object::{Object, list};
use super::prepare::{Prepared, PromptSource, Wanted};
use super::settings::{Limits, Settings};
use crate::generate::Finish;
use crate::host::reply::{Done, Token};
use crate::session::infill::Gap;
use serde_json::{Value, json};
use std::time::Duration;

/// Largest number of other texts of a request.
const MOST_CONTEXT: usize = 1024;

/// Reads a request.
///
/// # Errors
/// A field has a wrong value.
pub fn read(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let gap = Gap {
        prefix: required(body, "input_prefix")?,
        suffix: required(body, "input_suffix")?,
        context: take_context(body)?,
        begun: match body.take_prompts()? {
            None => String::new(),
            Some(Prompts::Texts(mut texts)) if texts.len() == 1 => texts.swap_remove(0),
            Some(_) => return Err(ApiError::field("prompt", "expected one text")),
        },
    };
    let most = match body.take("n_predict") {
        None => None,
        Some(value) if value == json!(-1) => None,
        Some(value) => {
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
            Some(number.ok_or_else(|| expected("n_predict", "a whole number, or -1", &value))?)
        }
    };
    if let Some(penalty) = body.take("repeat_penalty") {
        body.set("repetition_penalty", penalty);
    }
    body.flag("cache_prompt", true)?;
    // Editors send the names of llama.cpp's samplers, some of which do not exist here, and hints for its server.
    let is_list = matches!(body.get("samplers"), Some(Value::Array(_)));
    let hints = ["n_indent", "t_max_prompt_ms", "t_max_predict_ms", "response_fields"];
    for name in hints.into_iter().chain(is_list.then_some("samplers")) {
        if body.take(name).is_some() {
            body.ignore(name);
        }
    }
    let settings = Settings::take(body, limits)?;
    if settings.n != 1 {
        return Err(ApiError::field("n", "this endpoint generates one answer"));
    }
    let shows = most != Some(0);
    Ok(Job {
        // A request for no token computes the prompt, which later requests find in the prefix cache.
        wanted: Wanted::new(vec![PromptSource::Gap(Box::new(gap))], settings, most.map(|most| most.max(1))),
        keep_alive: None,
        id: "infill-",
        form: Box::new(move |named, plan, prepared| Box::new(Filled::of(named, plan.seed, shows, prepared))),
    })
}

fn required(body: &mut Body, name: &str) -> ApiResult<String> {
    body.text(name)?.ok_or_else(|| ApiError::field(name, "found none, expected a text"))
}

/// Takes `input_extra`: other texts with the names of their files.
fn take_context(body: &mut Body) -> ApiResult<Vec<(String, String)>> {
    let all = list(body.take("input_extra").unwrap_or_else(|| json!([])), "input_extra", MOST_CONTEXT)?;
    let text = |(i, value): (usize, Value)| {
        let mut object = Object::read(value, format!("input_extra[{i}]"))?;
        Ok((object.text("filename")?.unwrap_or_default(), object.required("text")?))
    };
    all.into_iter().enumerate().map(text).collect()
}

/// Answer of the endpoint.
struct Filled {
    named: Named,
    seed: u64,
    /// Whether the text is shown.
    shows: bool,
    text: String,
    usage: Usage,
    prefill: Duration,
    decode: Duration,
    /// Kind of the end, as llama.cpp calls it.
    stop_type: &'static str,
    stopped_by: String,
}

impl Filled {
    fn of(named: Named, seed: u64, shows: bool, prepared: &Prepared) -> Filled {
        Filled {
            named,
            seed,
            shows,
            text: String::new(),
            usage: Usage { prompt: prepared.prompts.first().map_or(0, Vec::len), ..Usage::default() },
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            stop_type: "none",
            stopped_by: String::new(),
        }
    }

    /// Builds an object with a text.
    fn object(&self, text: &str, stop: bool) -> Value {
        let generated = if self.shows { self.usage.generated } else { 0 };
        json!({
            "index": 0,
            "content": text,
            "stop": stop,
            "id_slot": 0,
            "model": self.named.model,
            "tokens_predicted": generated,
            "tokens_evaluated": self.usage.prompt,
        })
    }

    /// Builds the object that ends the answer.
    fn finished(&self, text: &str) -> Value {
        let Usage { prompt, cached, .. } = self.usage;
        let (read, ms) = (prompt.saturating_sub(cached), |time: Duration| time.as_secs_f64() * 1000.0);
        let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64().max(1e-9);
        // The first token belongs to the time of the prompt.
        let later = self.usage.generated.saturating_sub(1);
        let mut object = self.object(text, true);
        object["tokens_cached"] = json!(cached);
        object["truncated"] = json!(false);
        object["stop_type"] = json!(self.stop_type);
        object["stopping_word"] = json!(self.stopped_by);
        object["generation_settings"] = json!({"seed": self.seed});
        object["timings"] = json!({
            "cache_n": cached,
            "prompt_n": read,
            "prompt_ms": ms(self.prefill),
            "prompt_per_second": rate(read, self.prefill),
            "predicted_n": later,
            "predicted_ms": ms(self.decode),
            "predicted_per_second": rate(later, self.decode),
        });
        object
    }
}

impl Form for Filled {
    fn token(&mut self, token: Token, events: &mut Events) {
        self.usage.generated += 1;
        if self.shows {
            self.text += &token.text;
            events.data(|| self.object(&token.text, false));
        }
    }

    fn done(&mut self, done: Done, _: &mut Events) -> ApiResult<()> {
        let completion = done.completion;
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        self.usage.cached = completion.reused_tokens;
        (self.prefill, self.decode) = (completion.prefill_time(), completion.decode_time());
        self.stop_type = match completion.finish {
            _ if !self.shows => "limit",
            Finish::Length | Finish::Context => "limit",
            Finish::Stop => "word",
            _ => "eos",
        };
        self.stopped_by = completion.stopped_by.unwrap_or_default();
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        events.data(|| self.finished(""));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.data(|| error.to_json());
    }

    fn body(&mut self) -> Value {
        self.finished(&self.text)
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        self.stop_type
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::parts::tests::done;

    const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: true };

    fn job(value: &Value) -> ApiResult<(Job, Vec<String>)> {
        let mut body = Body::parse(value.to_string().as_bytes())?;
        let job = read(&mut body, &LIMITS)?;
        Ok((job, body.rest(false)?))
    }

    #[test]
    fn requests_of_editors_are_read() {
        // As llama.vim sends them.
        let body = json!({
            "input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x", "filename": "f", "time": 1}],
            "prompt": "c", "n_predict": 128, "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": false,
            "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true, "t_max_prompt_ms": 500,
            "repeat_penalty": 1.1, "response_fields": ["content"],
        });
        let (job, mut ignored) = job(&body).unwrap();
        ignored.sort();
        let expected =
            Gap { prefix: "a".into(), suffix: "b".into(), context: vec![("f".into(), "x".into())], begun: "c".into() };
        assert!(
            matches!(&job.wanted.sources[..], [PromptSource::Gap(gap)] if **gap == expected),
            "{:?}",
            job.wanted.sources
        );
        let sampling = &job.wanted.settings.sampling;
        assert_eq!((job.wanted.max_tokens, sampling.top_k, sampling.repeat_penalty), (Some(128), Some(40), Some(1.1)));
        assert_eq!(ignored, ["n_indent", "response_fields", "samplers", "t_max_prompt_ms"]);
        for (most, expected) in [(json!(-1), None), (json!(0), Some(1)), (Value::Null, None)] {
            let body = json!({"input_prefix": "", "input_suffix": "", "n_predict": most});
            assert_eq!(self::job(&body).unwrap().0.wanted.max_tokens, expected);
        }
    }

    #[test]
    fn wrong_requests_are_refused_by_the_name_of_their_field() {
        let with = |name: &str, value: Value| {
            let mut body = json!({"input_prefix": "a", "input_suffix": "b"});
            body[name] = value;
            body
        };
        let cases = [
            (json!({"input_suffix": "b"}), "input_prefix"),
            (json!({"input_prefix": "b"}), "input_suffix"),
            (with("input_prefix", json!(1)), "input_prefix"),
            (with("input_extra", json!("x")), "input_extra"),
            (with("input_extra", json!(["x"])), "input_extra[0]"),
            (with("input_extra", json!([{"filename": "f"}])), "input_extra[0].text"),
            (with("prompt", json!(["x", "y"])), "prompt"),
            (with("n_predict", json!(-2)), "n_predict"),
            (with("n_predict", json!("x")), "n_predict"),
            (with("n", json!(2)), "n"),
        ];
        for (body, field) in cases {
            let error = job(&body).err().unwrap_or_else(|| panic!("{body}"));
            assert_eq!(error.param.as_deref(), Some(field), "{body}: {error:?}");
        }
    }

    #[test]
    fn an_answer_has_the_form_of_llama_cpp() {
        for (shows, finish, text, stop_type) in [
            (true, Finish::Eos, "xy", "eos"),
            (true, Finish::Length, "xy", "limit"),
            (false, Finish::Length, "", "limit"),
        ] {
            let named = Named { id: "i".into(), model: "m".into(), created: 1 };
            let prepared = Prepared { prompts: vec![vec![1; 7]], ..Prepared::default() };
            let (mut form, mut events) = (Filled::of(named, 5, shows, &prepared), Events::new(true));
            for text in ["x", "y"] {
                form.token(Token { choice: 0, id: 1, text: text.into(), likely: None }, &mut events);
            }
            form.done(done(finish, None), &mut events).unwrap();
            form.end(&mut events);
            let streamed = events.take();
            let objects: Vec<Value> = (streamed.split_terminator("\n\n"))
                .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
                .collect();
            let joined: String = objects.iter().map(|object| object["content"].as_str().unwrap()).collect();
            let (last, whole) = (objects.last().unwrap(), form.body());
            assert_eq!((joined.as_str(), &whole["content"]), (text, &json!(text)));
            assert_eq!((&last["stop"], &last["stop_type"]), (&json!(true), &json!(stop_type)));
            assert_eq!((&whole["tokens_evaluated"], &whole["timings"]["cache_n"]), (&json!(7), &json!(5)));
        }
    }
}
