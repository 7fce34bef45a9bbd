//! See `sandvmm_fuzz::egress`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::egress::run_answers(data));
