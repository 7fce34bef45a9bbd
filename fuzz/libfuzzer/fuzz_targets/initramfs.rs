//! See `sandvmm_fuzz::kernel`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sandvmm_fuzz::kernel::run_initramfs(data));
