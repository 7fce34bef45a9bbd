//! See `sandvmm_fuzz::control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::control::run(data));
