//! See `sandvmm_fuzz::block`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::block::run(data));
