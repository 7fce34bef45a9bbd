//! See `sandvmm_fuzz::mmio`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::mmio::run(data));
