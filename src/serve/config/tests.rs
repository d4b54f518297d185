//! Tests of the settings.

use super::*;
use proptest::prelude::*;

fn merge(text: &str) -> Result<ServeSettings> {
    Given::merge(Given::default(), Given::parse(text.as_bytes())?)
}

/// Returns the effective settings of options.
fn options(options: &[(&str, &str)]) -> Result<ServeSettings> {
    let mut given = Given::default();
    for (name, text) in options {
        given.set(name, text).map_err(Error::usage)?;
    }
    Given::merge(given, Given::default())
}

#[test]
fn the_defaults_are_those_of_the_contract() {
    let defaults: Vec<(String, Option<String>)> = SETTINGS.iter().map(|row| (row.name(), (row.default)())).collect();
    let expected = [
        ("host", "127.0.0.1"),
        ("port", "8080"),
        ("unix", ""),
        ("grpc-port", ""),
        ("api-key-file", ""),
        ("no-auth", ""),
        ("max-seqs", "32"),
        ("max-step-tokens", "512"),
        ("step-ms", "200"),
        ("max-queue", "256"),
        ("max-queue-tokens", ""),
        ("queue-timeout", "1m"),
        ("aging", "10s"),
        ("ctx", ""),
        ("kv", ""),
        ("chat-template", ""),
        ("kv-memory", ""),
        ("prefix-cache", "on"),
        ("check-weights", "on"),
        ("state-dir", ""),
        ("state-disk", "8G"),
        ("adapter-dir", ""),
        ("max-adapters", "16"),
        ("lora-memory", "1G"),
        ("max-lora-rank", "128"),
        ("models-dir", ""),
        ("idle-unload", ""),
        ("max-body", "8M"),
        ("max-n", "16"),
        ("max-logprobs", "20"),
        ("drain-delay", "0s"),
        ("drain-timeout", "1m"),
        ("strict-fields", ""),
        ("cors-origin", ""),
        ("allowed-host", ""),
        ("log", "text"),
        ("otlp-endpoint", ""),
    ];
    let expected = expected.map(|(name, text)| (name.to_string(), Some(text.to_string()).filter(|t| !t.is_empty())));
    assert_eq!(defaults, expected);
    assert_eq!(Given::merge(Given::default(), Given::default()).unwrap(), ServeSettings::default());
    assert!(SETTINGS.iter().all(|row| !row.help().is_empty() && !row.help().starts_with(' ')));
    assert_eq!(SETTINGS[6].variable(), "IEC_MAX_SEQS");
}

#[test]
fn every_setting_of_the_file_and_of_options_has_the_same_effect() {
    let cases = [
        ("host", "\"::1\"", "::1"),
        ("port", "0", "0"),
        ("unix", "\"run/iec.sock\"", "run/iec.sock"),
        #[cfg(feature = "grpc")]
        ("grpc-port", "50051", "50051"),
        ("api-key-file", "\"keys.toml\"", "keys.toml"),
        ("no-auth", "true", "on"),
        ("max-seqs", "16", "16"),
        ("max-step-tokens", "1024", "1024"),
        ("step-ms", "100", "100"),
        ("max-queue", "5", "5"),
        ("max-queue-tokens", "5000", "5000"),
        ("queue-timeout", "\"90s\"", "1.5m"),
        ("aging", "\"0\"", "0"),
        ("ctx", "\"4k\"", "4096"),
        ("kv", "\"int8\"", "int8"),
        ("chat-template", "\"chatml\"", "ChatML"),
        ("kv-memory", "\"2G\"", "2147483648"),
        ("prefix-cache", "false", "off"),
        ("check-weights", "false", "off"),
        ("state-dir", "\"state\"", "state"),
        ("state-disk", "1024", "1K"),
        ("adapter-dir", "\"adapters\"", "adapters"),
        ("max-adapters", "3", "3"),
        ("lora-memory", "\"100MB\"", "100000000"),
        ("max-lora-rank", "64", "64"),
        ("models-dir", "\"models\"", "models"),
        ("idle-unload", "\"5m\"", "300s"),
        ("max-body", "\"1M\"", "1024K"),
        ("max-n", "1", "1"),
        ("max-logprobs", "0", "0"),
        ("drain-delay", "\"5s\"", "5000ms"),
        ("drain-timeout", "\"200ms\"", "0.2s"),
        ("strict-fields", "true", "true"),
        ("cors-origin", "[\"https://a.example\", \"http://b:81\"]", "https://a.example, http://b:81"),
        ("allowed-host", "[\"chat.example\"]", "chat.example"),
        ("log", "\"json\"", "json"),
        #[cfg(feature = "otel")]
        ("otlp-endpoint", "\"http://127.0.0.1:4318\"", "http://127.0.0.1:4318"),
    ];
    let names: Vec<String> = SETTINGS.iter().map(Setting::name).collect();
    let missing = [("otlp-endpoint", cfg!(feature = "otel")), ("grpc-port", cfg!(feature = "grpc"))];
    let possible = names.iter().filter(|name| !missing.contains(&(name.as_str(), false)));
    assert_eq!(cases.map(|(name, ..)| name).to_vec(), possible.collect::<Vec<_>>());
    for (name, toml, text) in cases {
        let from_file = merge(&format!("{name} = {toml}")).unwrap();
        assert_eq!(from_file, options(&[(name, text)]).unwrap(), "{name}");
        assert_ne!(from_file, ServeSettings::default(), "{name}");
        let json = from_file.to_json();
        assert_ne!(json[name.replace('-', "_")], ServeSettings::default().to_json()[name.replace('-', "_")], "{name}");
    }
}

#[test]
fn options_win_over_variables_these_over_the_file_and_the_file_over_defaults() {
    let given = |settings: &[(&str, &str)]| {
        let mut given = Given::default();
        settings.iter().for_each(|(name, text)| given.set(name, text).unwrap());
        given
    };
    let options = given(&[("port", "1"), ("model", "a=x"), ("model", "y"), ("cors-origin", "*")]);
    let variables = given(&[("port", "2"), ("max-seqs", "2"), ("lora", "l=d:0.5")]);
    let file =
        b"port = 3\nmax-seqs = 3\nmax-n = 3\ncors-origin = [\"http://x\"]\n[[model]]\nname = \"m\"\npath = \"p\"\n\
        [[lora]]\nname = \"f\"\ndir = \"e\"\nscale = 2";
    let file = Given::parse(file).unwrap();
    assert_eq!(file.loras, Some(vec![AdapterSource { name: "f".into(), dir: "e".into(), scale: 2.0, root: None }]));
    let settings = Given::merge(options.or(variables), file).unwrap();
    assert_eq!((settings.port, settings.max_seqs, settings.max_n, settings.max_logprobs), (1, 2, 3, 20));
    assert_eq!(settings.cors_origin, ["*"]);
    let models = [("a", "x"), ("", "y")].map(|(name, path)| {
        let name = Some(name.to_string()).filter(|name| !name.is_empty());
        ModelSource { name, path: path.into(), chat_template: None }
    });
    assert_eq!(settings.models, models);
    assert_eq!(settings.loras, [AdapterSource { name: "l".into(), dir: "d".into(), scale: 0.5, root: None }]);
    let json = settings.to_json();
    assert_eq!(json["models"][1], json!({"name": null, "path": "y", "chat_template": null}));
    assert_eq!(json["loras"], json!([{"name": "l", "dir": "d", "scale": 0.5}]));
    assert_eq!((&json["state_disk"], &json["queue_timeout"]), (&json!(8u64 << 30), &json!("1m")));
}

#[test]
fn mistakes_in_the_file_are_refused_with_their_line() {
    let cases = [
        ("prot = 1", "line 1: found the unknown name `prot`, expected perhaps `port`"),
        ("\nmax_seqs = 1", "line 2: `max_seqs`: expected the name with hyphens, `max-seqs`"),
        ("zzzz = 1", "expected host, port"),
        ("port = 65536", "line 1: `port`: the number is out of range, expected 0 to 65535"),
        ("port = \"1\"", "found a text, expected a whole number"),
        ("aging = 5", "found a whole number, expected a text"),
        ("aging = \"5\"", "`aging`: found `5`, expected a duration like"),
        ("max-body = \"8X\"", "no unit of size"),
        ("max-body = 1", "max-body: found 1, expected 1K to 1G"),
        ("max-seqs = 0", "max-seqs: found 0, expected 1 to 65536"),
        ("ctx = -1", "out of range"),
        ("kv = \"f8\"", "`kv`: "),
        ("log = \"xml\"", "expected text or json"),
        ("no-auth = 1", "expected true or false"),
        ("no-auth = true\napi-key-file = \"k\"", "no-auth: found api-key-file"),
        ("host = \"a b\"", "host: found `a b`"),
        ("host = \"a:80\"", "host: found `a:80`"),
        ("allowed-host = [\"https://a\"]", "allowed-host: found"),
        ("cors-origin = [\"a.example\"]", "cors-origin: found `a.example`"),
        ("cors-origin = \"*\"", "found a text, expected a list of texts"),
        ("model = \"x\"", "expected tables that begin with a line [[model]]"),
        ("[[model]]\nname = \"a\"", "this model has no `path`"),
        ("[[model]]\npath = \"\"", "expected a path"),
        ("[[model]]\nname = \"a b\"\npath = \"p\"", "line 2: `name`: expected a name"),
        ("[[model]]\ndir = \"a\"", "line 2: found the unknown name `dir`"),
        ("[[lora]]\nname = \"a\"", "this adapter has no `dir`"),
        ("[[lora]]\ndir = \"a\"", "this adapter has no `name`"),
        ("[[lora]]\nname = \"a=b\"\ndir = \"a\"", "expected a name"),
        ("[[lora]]\nname = \"a\"\ndir = \"a\"\nscale = inf", "`scale`"),
        ("[[model]]\nname = \"a\"\npath = \"p\"\n[[lora]]\nname = \"a\"\ndir = \"d\"", "found the name twice"),
    ];
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|(text, message)| match merge(text) {
            Ok(_) => Some(format!("{text}: accepted")),
            Err(e) if e.to_string().contains(message) && e.cause().exit_code() == 2 => None,
            Err(e) => Some(format!("{text}: {e}, expected {message}")),
        })
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(options(&[("nothing", "1")]).is_err() && options(&[("port", "x")]).is_err());
    assert!(options(&[("model", "")]).is_err() && options(&[("no-auth", "maybe")]).is_err());
}

#[test]
fn other_machines_are_served_with_keys_only_unless_the_user_says_otherwise() {
    let cases = [
        ("127.0.0.1", true),
        ("127.8.9.1", true),
        ("::1", true),
        ("localhost", true),
        ("0.0.0.0", false),
        ("::", false),
        ("192.168.0.1", false),
        ("gpu.example", false),
        ("localhost.example", false),
    ];
    for (host, is_local) in cases {
        let settings = options(&[("host", host)]).unwrap();
        assert_eq!(settings.check_host(false).is_ok(), is_local, "{host}");
        assert!(settings.check_host(true).is_ok());
        assert!(options(&[("host", host), ("no-auth", "on")]).unwrap().check_host(false).is_ok());
    }
    let error = options(&[("host", "::")]).unwrap().check_host(false).unwrap_err();
    assert_eq!((error.cause().exit_code(), error.help_text().is_some()), (2, true));
}

#[test]
fn the_scheduler_gets_its_limits() {
    let settings = options(&[("step-ms", "50"), ("queue-timeout", "2s"), ("max-queue-tokens", "9")]).unwrap();
    let limits = settings.scheduler_options(7, 900);
    assert_eq!((limits.pages, limits.ctx, limits.step, limits.max_queue_tokens), (7, 900, 50_000, 9));
    assert_eq!((limits.queue_timeout, limits.aging, limits.max_seqs), (2_000_000, 10_000_000, 32));
    assert_eq!(ServeSettings::default().scheduler_options(7, 900), sched::Options::with_pages(7, 900));
}

#[test]
fn a_file_is_read_and_named_in_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("iec.toml");
    std::fs::write(&path, "port = 1").unwrap();
    assert_eq!(Given::read(&path).unwrap().port, Some(1));
    std::fs::write(&path, "port = ").unwrap();
    assert_eq!(Given::read(&path).unwrap_err().file(), Some(path.as_path()));
    assert!(Given::parse(&vec![b'#'; (1 << 20) + 1]).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes: Vec<u8>, name in 0..SETTINGS.len()) {
        let _ = Given::parse(&bytes);
        let _ = Given::parse(&[SETTINGS[name].name().as_bytes(), b" = ", &bytes].concat());
    }

    #[test]
    fn any_text_is_a_value_of_an_option_or_refused(text: String, name in 0..SETTINGS.len()) {
        let mut given = Given::default();
        let (first, again) = (given.set(&SETTINGS[name].name(), &text), given.clone());
        prop_assert_eq!(first.is_ok(), again != Given::default());
        let _ = Given::merge(given, Given::default());
        let _ = text.parse::<ModelSource>();
    }
}

#[test]
fn a_collector_has_an_address_and_needs_a_build_with_open_telemetry() {
    let message = |text: &str| options(&[("otlp-endpoint", text)]).unwrap_err().to_string();
    if !cfg!(feature = "otel") {
        let found = message("http://127.0.0.1:4318");
        assert!(found.contains("this build has no OpenTelemetry"), "{found}");
        return;
    }
    for text in ["", "localhost:4318", "/v1/traces", "ftp://localhost", "http://", "http://localhost?a=b"] {
        assert!(message(text).contains("otlp-endpoint: expected an address like"), "{text}");
    }
    assert!(message("http://user:secret@localhost").contains("found a user name"));
    assert!(!message("http://user:secret@localhost").contains("secret"));
    options(&[("otlp-endpoint", "https://collector.example/otlp")]).unwrap();
}

#[test]
fn a_port_of_grpc_needs_its_feature_and_is_not_that_of_http() {
    let with = |port| Given::merge(Given { grpc_port: Some(port), ..Given::default() }, Given::default());
    let error = with(8080).unwrap_err().to_string();
    match cfg!(feature = "grpc") {
        true => assert!(with(0).is_ok() && error.contains("another port"), "{error}"),
        false => assert!(error.contains("no gRPC") && with(0).is_err(), "{error}"),
    }
}
