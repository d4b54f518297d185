//! AVX-512 kernel that widens 4-bit integers to bf16. It uses intrinsics, because `vpermw` looks up 32 numbers at once,
//! which takes half as many instructions as the arithmetic of the vectorized loop in `kv`.

use std::arch::x86_64::*;

/// The bf16 bits of the integers of all codes in two's complement; the second half is not used.
static NUMBERS: [u16; 32] = {
    let mut numbers = [0; 32];
    let mut code = 0;
    while code < 16 {
        let integer = if code < 8 { code as i32 } else { code as i32 - 16 };
        numbers[code] = ((integer as f32).to_bits() >> 16) as u16;
        code += 1;
    }
    numbers
};

/// Writes the two integers of each byte as bf16 to a word, the low half first.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn nibbles(bytes: &[u8], words: &mut [u32]) {
    let ((chunks, rest), (words, last)) = (bytes.as_chunks::<16>(), words.as_chunks_mut::<16>());
    // SAFETY: 64 readable bytes; the load has no alignment demand.
    let numbers = unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) };
    let mask = _mm512_set1_epi32(0x000f_000f);
    let mut i = 0;
    while i < chunks.len() && i < words.len() {
        // SAFETY: 16 readable bytes; the load has no alignment demand.
        let wide = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(chunks[i].as_ptr().cast()) });
        let codes = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi32::<12>(wide)), mask);
        // SAFETY: 16 writable words; the store has no alignment demand.
        unsafe { _mm512_storeu_si512(words[i].as_mut_ptr().cast(), _mm512_permutexvar_epi16(codes, numbers)) };
        i += 1;
    }
    for (word, byte) in last.iter_mut().zip(rest) {
        let number = |code: u8| u32::from(NUMBERS[usize::from(code)]);
        *word = number(byte & 15) | number(byte >> 4) << 16;
    }
}
