//! See `sandvmm_fuzz::supervisor`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::supervisor::run(data));
