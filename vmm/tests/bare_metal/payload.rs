//! Guest code: position-independent, 64-bit, entered as a Linux kernel is.

/// Declares guest code in assembly as a constant-like function that returns its bytes.
macro_rules! payload {
    ($(#[$doc:meta])* $name:ident, $($line:literal,)+) => {
        core::arch::global_asm!(
            ".pushsection .rodata",
            concat!(".global ", stringify!($name), "_begin"),
            concat!(".global ", stringify!($name), "_end"),
            concat!(stringify!($name), "_begin:"),
            $($line,)+
            concat!(stringify!($name), "_end:"),
            ".popsection",
        );

        $(#[$doc])*
        pub(crate) fn $name() -> &'static [u8] {
            unsafe extern "C" {
                #[link_name = concat!(stringify!($name), "_begin")]
                static BEGIN: u8;
                #[link_name = concat!(stringify!($name), "_end")]
                static END: u8;
            }
            let (begin, end) = (&raw const BEGIN, &raw const END);
            // SAFETY: both labels are in read-only data of this program, the second behind the first, with nothing but
            // the assembled bytes in between.
            unsafe { std::slice::from_raw_parts(begin, end as usize - begin as usize) }
        }
    };
}

pub(crate) use payload;
