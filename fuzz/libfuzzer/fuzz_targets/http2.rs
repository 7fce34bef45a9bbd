//! See `sandvmm_fuzz::http2`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::http2::run(data));
