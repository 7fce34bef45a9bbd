//! Names: which ones sandboxes that stay, templates and workspaces can have, and ones that nothing else has.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::now_ns;

/// Longest name of a sandbox that stays, a template or a workspace, in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Whether a sandbox that stays, a template or a workspace can have this name: 1 to [`MAX_NAME_BYTES`] letters of ASCII, digits, `.`, `_` and
/// `-`, the first of them a letter or digit. Such a name is a file's, and leads nowhere else.
///
/// ```
/// assert!(sandvmm::is_name("dev-1"));
/// assert!(!sandvmm::is_name("../dev"));
/// ```
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.len() <= MAX_NAME_BYTES
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.bytes().all(is_plain)
}

/// An end of a name that no other process or thread has.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // Where two have one number, in two containers, the time tells them apart.
    format!("{}-{count}-{}", std::process::id(), now_ns())
}
