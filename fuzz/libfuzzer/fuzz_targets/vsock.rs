//! See `sandvmm_fuzz::vsock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::vsock::run(data));
