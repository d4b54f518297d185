//! Checks of settings: ranges, contradictions, and a server on a network without keys.

use super::{ServeSettings, Size};
use crate::error::{Error, Result};
use crate::serve::origin;
use std::collections::HashSet;
use std::ops::RangeInclusive;

/// Smallest and largest body of a request in bytes.
const BODIES: RangeInclusive<u64> = 1 << 10..=1 << 30;

impl ServeSettings {
    /// Tests the ranges of values, and settings against each other.
    pub(super) fn check(&self) -> Result<()> {
        let wide = |n: usize| n as u64;
        let ranges = [
            ("max-seqs", wide(self.max_seqs), 1..=65_536),
            ("max-step-tokens", u64::from(self.max_step_tokens), 1..=1 << 20),
            ("step-ms", self.step_ms, 1..=60_000),
            ("max-queue", wide(self.max_queue), 1..=1_000_000),
            ("max-queue-tokens", self.max_queue_tokens.unwrap_or(u64::MAX), 1..=u64::MAX),
            ("ctx", wide(self.ctx.unwrap_or(1)), 1..=u64::from(u32::MAX)),
            ("max-adapters", wide(self.max_adapters), 1..=65_536),
            ("max-lora-rank", wide(self.max_lora_rank), 1..=65_536),
            ("max-n", wide(self.max_n), 1..=1024),
            ("max-logprobs", wide(self.max_logprobs), 0..=1024),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                let (least, most) = range.into_inner();
                return Err(Error::usage(format!("{name}: found {value}, expected {least} to {most}")));
            }
        }
        if !BODIES.contains(&self.max_body.0) {
            let (least, most) = (Size(*BODIES.start()), Size(*BODIES.end()));
            return Err(Error::usage(format!("max-body: found {}, expected {least} to {most}", self.max_body)));
        }
        if self.idle_unload.is_some_and(|time| time.is_zero()) {
            return Err(
                Error::usage("idle-unload: found 0, expected a longer time").help("leave it out to keep models loaded")
            );
        }
        self.check_hosts()?;
        self.check_otlp()?;
        self.check_grpc()?;
        self.check_names()?;
        if self.no_auth && self.api_key_file.is_some() {
            return Err(Error::usage("no-auth: found api-key-file, too, expected one of them")
                .help("leave out no-auth to require keys, or api-key-file to serve without keys"));
        }
        Ok(())
    }

    #[cfg(feature = "otel")]
    fn check_otlp(&self) -> Result<()> {
        let url = self.otlp_endpoint.as_deref().map(crate::serve::trace::url_of).transpose();
        url.map(drop).map_err(|why| Error::usage(format!("otlp-endpoint: {why}")))
    }

    #[cfg(not(feature = "otel"))]
    fn check_otlp(&self) -> Result<()> {
        match self.otlp_endpoint {
            None => Ok(()),
            Some(_) => Err(Error::usage("otlp-endpoint: this build has no OpenTelemetry")
                .help("build with --features otel, or leave out otlp-endpoint")),
        }
    }

    fn check_grpc(&self) -> Result<()> {
        match self.grpc_port {
            Some(_) if cfg!(not(feature = "grpc")) => Err(Error::usage("grpc-port: this build has no gRPC")
                .help("build with --features grpc, or leave out grpc-port")),
            Some(port) if port != 0 && port == self.port => {
                Err(Error::usage(format!("grpc-port: found {port}, expected another port than that of HTTP")))
            }
            _ => Ok(()),
        }
    }

    fn check_hosts(&self) -> Result<()> {
        if !origin::is_host(&self.host) {
            let found = &self.host;
            return Err(Error::usage(format!("host: found `{found}`, expected an address or a name without a port")));
        }
        if let Some(host) = self.allowed_host.iter().find(|host| *host != "*" && !origin::is_host(host)) {
            return Err(Error::usage(format!("allowed-host: found `{host}`, expected a name without a port, or *")));
        }
        match self.cors_origin.iter().find(|origin| *origin != "*" && !origin::is_origin(origin)) {
            None => Ok(()),
            Some(found) => {
                Err(Error::usage(format!("cors-origin: found `{found}`, expected an origin like https://chat.example")))
            }
        }
    }

    /// Tests that the names of models and adapters differ, because requests choose both by name.
    fn check_names(&self) -> Result<()> {
        let models = self.models.iter().filter_map(|model| model.name.as_deref());
        let mut names = HashSet::new();
        let mut repeated = models.chain(self.loras.iter().map(|lora| lora.name.as_str()));
        match repeated.find(|name| !names.insert(*name)) {
            Some(name) => Err(Error::usage(format!("model or lora `{name}`: found the name twice, expected it once"))),
            None => Ok(()),
        }
    }

    /// Tests that a server which other machines can reach has keys, or that `--no-auth` allows it to have none.
    ///
    /// # Errors
    /// The server listens on another interface than the loopback one, has no keys, and `--no-auth` is not set.
    pub fn check_host(&self, has_keys: bool) -> Result<()> {
        if has_keys || self.no_auth || origin::is_loopback(&self.host) {
            return Ok(());
        }
        let message = format!("host: `{}` can be reached from other machines, and there are no keys", self.host);
        Err(Error::usage(message)
            .help("add --api-key-file or set IEC_API_KEY; --no-auth serves everyone who reaches the port"))
    }
}
