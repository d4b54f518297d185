//! A small, fast, seeded generator (xoshiro256++ by Blackman and Vigna, seeded by SplitMix64): the same seed gives the
//! same numbers on every machine and in every version, which sampling and synthetic checkpoints rely on.

use ring::rand::{SecureRandom, SystemRandom};
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a random number from the system, for names and seeds.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without a source of random numbers, the time must do: the numbers name requests and seed samplers.
    if SystemRandom::new().fill(&mut bytes).is_err() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        bytes = (now.as_nanos() as u64).to_le_bytes();
    }
    u64::from_le_bytes(bytes)
}

/// State of xoshiro256++.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Rng {
        let mut s = seed;
        let mut next = || {
            s = s.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = s;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        Rng { state: [next(), next(), next(), next()] }
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Returns a uniform number in [0, 1) with 53 random bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a standard normal number (Box-Muller, one of the pair).
    pub fn next_normal(&mut self) -> f64 {
        let u = 1.0 - self.next_f64();
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * self.next_f64()).cos()
    }
}
