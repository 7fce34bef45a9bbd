//! The one call that lets a program serve as a machine's process.

/// First call in `main` of any program that uses this crate: when this process was started as a machine's
/// process, it serves that machine and never returns; otherwise it returns at once.
///
/// It must come before threads are started, files are opened or arguments are read.
pub fn init() {}
