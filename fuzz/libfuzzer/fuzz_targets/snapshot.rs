//! See `sandvmm_fuzz::snapshot`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::snapshot::run(data));
