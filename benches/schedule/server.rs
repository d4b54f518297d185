//! The loads of this benchmark through the HTTP interface of llama.cpp's `llama-server`.

use super::{GAP_PROMPT, Loads, SEQUENCES, Times};
use iec::sched::Micros;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A server at `HOST:PORT` that runs the same model.
pub struct Server(pub String);

/// What a server tells at the end of an answer.
struct Ended {
    /// Prompt tokens that it computed.
    computed: usize,
    answer: usize,
}

impl Server {
    /// Requests an answer of `count` tokens; `token` is called for each part of the stream.
    fn complete(&self, prompt: &[u32], count: usize, reuse: bool, mut token: impl FnMut()) -> Ended {
        let body = serde_json::json!({
            "prompt": prompt, "n_predict": count, "ignore_eos": true, "temperature": 0, "stream": true,
            "cache_prompt": reuse,
        })
        .to_string();
        let mut stream = TcpStream::connect(&self.0).expect("a server");
        write!(
            stream,
            "POST /completion HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.0,
            body.len()
        )
        .expect("a request");
        // Lines of the chunked encoding between the events are skipped.
        for line in BufReader::new(stream).lines() {
            let line = line.expect("an answer");
            let Some(event) = line.strip_prefix("data: ") else { continue };
            let event: serde_json::Value = serde_json::from_str(event).expect("an event");
            if event["stop"] == true {
                let number = |name: &str| event["timings"][name].as_u64().expect("timings") as usize;
                return Ended { computed: number("prompt_n"), answer: number("predicted_n") };
            }
            token();
        }
        panic!("the server ended without the last event");
    }

    /// Sends requests, at most [`SEQUENCES`] at a time; returns the prompt tokens that were computed, the tokens of the
    /// answers and the seconds.
    fn all(&self, requests: &[(Vec<u32>, usize)], reuse: bool) -> (usize, usize, f64) {
        let (next, sums, begin) = (AtomicUsize::new(0), Mutex::new((0, 0)), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..SEQUENCES {
                scope.spawn(|| {
                    while let Some((prompt, count)) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let ended = self.complete(prompt, *count, reuse, || {});
                        let mut sums = sums.lock().expect("no panic");
                        *sums = (sums.0 + ended.computed, sums.1 + ended.answer);
                    }
                });
            }
        });
        let (computed, answers) = sums.into_inner().expect("no panic");
        (computed, answers, begin.elapsed().as_secs_f64())
    }

    /// Measures the same as the engine: requests that come and go, a common head, and the gap beside a long prompt.
    pub fn measure(&self, loads: &Loads) {
        self.all(&loads.come_and_go[..SEQUENCES], false);
        let (_, answers, seconds) = self.all(&loads.come_and_go, false);
        println!("server, come and go: {seconds:.1} s, {:.1} answer tokens/s", answers as f64 / seconds);
        let (computed, _, seconds) = self.all(&loads.heads, true);
        println!("server, head: {computed} prompt tokens computed, {seconds:.1} s");
        self.gap(loads);
    }

    fn gap(&self, loads: &Loads) {
        let count = AtomicUsize::new(0);
        let largest = std::thread::scope(|scope| {
            let stream = scope.spawn(|| {
                let (mut last, mut largest) = (None::<Instant>, Duration::ZERO);
                self.complete(&loads.stream, 200, false, || {
                    let now = Instant::now();
                    largest = largest.max(last.replace(now).map_or(Duration::ZERO, |last| now - last));
                    count.fetch_add(1, Ordering::Relaxed);
                });
                largest
            });
            while count.load(Ordering::Relaxed) < 20 {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.complete(&loads.long, 2, false, || {});
            stream.join().expect("no panic")
        });
        println!("server, gap: {:.0} ms beside a prompt of {GAP_PROMPT} tokens", largest.as_secs_f64() * 1e3);
    }

    /// Sends requests at their times of arrival and returns the times that they take.
    pub fn load(&self, arrivals: &[(Micros, Vec<u32>, usize)]) -> Times {
        let (begin, times) = (Instant::now(), Mutex::new(Times::default()));
        std::thread::scope(|scope| {
            for (time, prompt, count) in arrivals {
                let due = begin + Duration::from_micros(*time);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                let times = &times;
                scope.spawn(move || {
                    let (mut first, mut last, mut gaps) = (None, due, Vec::new());
                    self.complete(prompt, *count, false, || {
                        let now = Instant::now();
                        match first {
                            None => first = Some(now - due),
                            Some(_) => gaps.push(now - last),
                        }
                        last = now;
                    });
                    let mut times = times.lock().expect("no panic");
                    let micros = |time: Duration| time.as_micros() as Micros;
                    gaps.into_iter().for_each(|gap| times.gap.add(micros(gap)));
                    times.first_token.add(micros(first.unwrap_or_default()));
                    times.whole.add(micros(last - due));
                });
            }
        });
        times.into_inner().expect("no panic")
    }
}
