//! Durations, sizes and numbers as they are written on the command line.

use std::ops::RangeInclusive;
use std::time::Duration;

use sandvmm::{MAX_QUOTA_MIB, MIN_QUOTA_MIB};

/// The largest share of the processors in percent of one: that of 32 and one more.
const MAX_SHARE_PERCENT: u32 = 3300;

/// Why a duration, a size or a number could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QuantityError {
    /// Not a duration at all.
    #[error("Say a duration such as 30s, 1m30s or 500ms; 0 for none")]
    NotADuration,
    /// Not a size at all.
    #[error("Say a size such as 256M or 2G: a whole number, above 0, of K, M or G")]
    NotASize,
    /// No number, or one that is not possible.
    #[error("Say a whole number from {min} to {max}")]
    NotInRange {
        /// The least that is possible.
        min: u32,
        /// The most.
        max: u32,
    },
    /// Not a share at all.
    #[error(
        "Say a share in percent of one processor, such as 50% or 150%: 1% to {MAX_SHARE_PERCENT}%"
    )]
    NotAShare,
    /// A disk that is not possible.
    #[error("A disk has {MIN_QUOTA_MIB}M to {}G", MAX_QUOTA_MIB >> 10)]
    NoDisk,
    /// A size that is no whole number of MiB.
    #[error("Sizes come in whole MiB: say a multiple of 1M")]
    NotWholeMib,
    /// More than fits.
    #[error("That is more than can be counted")]
    TooLarge,
}

/// A time-out; `None` is none at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeout(pub(crate) Option<Duration>);

impl Timeout {
    pub(crate) fn parse(text: &str) -> Result<Self, QuantityError> {
        parse_timeout(text).map(Self)
    }
}

/// Reads a duration: numbers with the units `h`, `m`, `s` and `ms`, one after the other (`1m30s`,
/// `1.5s`), or a bare number of seconds. `0` is no limit: `None`.
///
/// # Errors
/// [`QuantityError::NotADuration`] and [`QuantityError::TooLarge`].
pub(crate) fn parse_timeout(text: &str) -> Result<Option<Duration>, QuantityError> {
    let mut total = Duration::ZERO;
    let mut rest = text;
    if rest.is_empty() {
        return Err(QuantityError::NotADuration);
    }
    while !rest.is_empty() {
        let (number, after) = split_where(rest, |c| !(c.is_ascii_digit() || c == '.'));
        let (unit, after) = split_where(after, |c| c.is_ascii_digit() || c == '.');
        let unit_ns = match unit {
            "h" => 3_600_000_000_000,
            "m" => 60_000_000_000,
            "s" => 1_000_000_000,
            "ms" => 1_000_000,
            "" if number.len() == text.len() => 1_000_000_000,
            _ => return Err(QuantityError::NotADuration),
        };
        total = total
            .checked_add(times(number, unit_ns)?)
            .ok_or(QuantityError::TooLarge)?;
        rest = after;
    }
    Ok((!total.is_zero()).then_some(total))
}

/// Reads a size of memory in MiB: a whole number with the unit `K`, `M` or `G` (powers of 1024; also
/// lower case, and as `KiB`, `MiB`, `GiB`).
///
/// # Errors
/// [`QuantityError::NotASize`], [`QuantityError::NotWholeMib`] and [`QuantityError::TooLarge`].
pub(crate) fn parse_memory_mib(text: &str) -> Result<u32, QuantityError> {
    let size_kib = parse_kib(text)?;
    if size_kib % 1024 != 0 {
        return Err(QuantityError::NotWholeMib);
    }
    u32::try_from(size_kib / 1024).map_err(|_| QuantityError::TooLarge)
}

/// Reads the size of a disk in MiB, of the same form.
///
/// # Errors
/// [`QuantityError::NoDisk`] and those of [`parse_memory_mib`].
pub(crate) fn parse_disk_mib(text: &str) -> Result<u32, QuantityError> {
    let size_mib = parse_memory_mib(text)?;
    if (MIN_QUOTA_MIB..=MAX_QUOTA_MIB).contains(&size_mib) {
        return Ok(size_mib);
    }
    Err(QuantityError::NoDisk)
}

/// Reads a number of bytes above 0, of the same form and not only in whole MiB.
///
/// # Errors
/// [`QuantityError::NotASize`] and [`QuantityError::TooLarge`].
pub(crate) fn parse_bytes(text: &str) -> Result<u64, QuantityError> {
    match parse_kib(text)?.checked_mul(1024) {
        Some(0) => Err(QuantityError::NotASize),
        bytes => bytes.ok_or(QuantityError::TooLarge),
    }
}

fn parse_kib(text: &str) -> Result<u64, QuantityError> {
    let (number, unit) = split_where(text, |c| !c.is_ascii_digit());
    let unit_kib: u64 = match unit.to_ascii_lowercase().as_str() {
        "k" | "kib" => 1,
        "m" | "mib" => 1024,
        "g" | "gib" => 1024 * 1024,
        _ => return Err(QuantityError::NotASize),
    };
    whole(number, QuantityError::NotASize)?
        .checked_mul(unit_kib)
        .ok_or(QuantityError::TooLarge)
}

/// Reads a share of the processors: whole percent of one, with the sign.
///
/// # Errors
/// [`QuantityError::NotAShare`].
pub(crate) fn parse_share_percent(text: &str) -> Result<u32, QuantityError> {
    let percent = text.strip_suffix('%').ok_or(QuantityError::NotAShare)?;
    number(1..=MAX_SHARE_PERCENT)(percent).map_err(|_| QuantityError::NotAShare)
}

/// A reader of whole numbers of a range.
pub(crate) fn number<T: TryFrom<u32>>(
    range: RangeInclusive<u32>,
) -> impl Fn(&str) -> Result<T, QuantityError> + Clone {
    move |text| {
        let otherwise = QuantityError::NotInRange {
            min: *range.start(),
            max: *range.end(),
        };
        let number = whole(text, otherwise.clone())
            .ok()
            .and_then(|number| u32::try_from(number).ok())
            .filter(|number| range.contains(number));
        number
            .and_then(|number| T::try_from(number).ok())
            .ok_or(otherwise)
    }
}

/// Splits before the first character for which `ends` holds.
fn split_where(text: &str, ends: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(ends).unwrap_or(text.len()))
}

/// A decimal number, maybe with a fraction, of units of `unit_ns` nanoseconds.
fn times(number: &str, unit_ns: u64) -> Result<Duration, QuantityError> {
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if integer.is_empty() || fraction.len() > 9 || number.ends_with('.') {
        return Err(QuantityError::NotADuration);
    }
    let mut total_ns = whole(integer, QuantityError::NotADuration)?
        .checked_mul(unit_ns)
        .ok_or(QuantityError::TooLarge)?;
    if !fraction.is_empty() {
        let parts = u128::from(whole(fraction, QuantityError::NotADuration)?);
        let scale = fraction.bytes().fold(1u128, |scale, _| scale * 10);
        let fraction_ns = u64::try_from(parts * u128::from(unit_ns) / scale)
            .map_err(|_| QuantityError::TooLarge)?;
        total_ns = total_ns
            .checked_add(fraction_ns)
            .ok_or(QuantityError::TooLarge)?;
    }
    Ok(Duration::from_nanos(total_ns))
}

/// A whole number of ASCII digits; `otherwise` when it is none.
fn whole(digits: &str, otherwise: QuantityError) -> Result<u64, QuantityError> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(otherwise);
    }
    digits.parse().map_err(|_| QuantityError::TooLarge)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read() {
        for (text, millis) in [
            ("30s", 30_000),
            ("1m30s", 90_000),
            ("500ms", 500),
            ("2h", 7_200_000),
            ("1.5s", 1_500),
            ("0.25m", 15_000),
            ("1s500ms", 1_500),
            ("7", 7_000),
            ("0.5", 500),
        ] {
            assert_eq!(
                parse_timeout(text),
                Ok(Some(Duration::from_millis(millis))),
                "{text}"
            );
        }
    }

    #[test]
    fn zero_is_no_limit_in_any_unit() {
        for text in ["0", "0s", "0ms", "0m0s", "0.0"] {
            assert_eq!(parse_timeout(text), Ok(None), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in [
            "", "s", "abc", "-1s", "1 s", "10x", "1m30", "1..5s", "1.s", ".5s", "1e3s", "٣s", "30S",
        ] {
            assert_eq!(
                parse_timeout(text),
                Err(QuantityError::NotADuration),
                "{text}"
            );
        }
        for text in [
            "99999999999999999999s",
            "99999999999h",
            "18446744073709551615",
        ] {
            assert_eq!(parse_timeout(text), Err(QuantityError::TooLarge), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_in_mib() {
        for (text, mib) in [
            ("256M", 256),
            ("1G", 1024),
            ("2048K", 2),
            ("64m", 64),
            ("3GiB", 3072),
            ("0M", 0),
        ] {
            assert_eq!(parse_memory_mib(text), Ok(mib), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for (text, error) in [
            ("", QuantityError::NotASize),
            ("256", QuantityError::NotASize),
            ("M", QuantityError::NotASize),
            ("-1M", QuantityError::NotASize),
            ("1.5G", QuantityError::NotASize),
            ("256MB", QuantityError::NotASize),
            ("1000K", QuantityError::NotWholeMib),
            ("99999999999999G", QuantityError::TooLarge),
            ("5000000G", QuantityError::TooLarge),
        ] {
            assert_eq!(parse_memory_mib(text), Err(error), "{text}");
        }
    }

    #[test]
    fn a_number_outside_its_range_is_told_the_range() {
        let cpus = number::<u8>(1..=32);

        assert_eq!((cpus("1"), cpus("32"), cpus("007")), (Ok(1), Ok(32), Ok(7)));
        for text in [
            "",
            "x",
            "0",
            "33",
            "-1",
            "+1",
            "1.5",
            "99999999999999999999",
        ] {
            let said = cpus(text).unwrap_err().to_string();
            assert_eq!(said, "Say a whole number from 1 to 32", "{text}");
        }
    }

    #[test]
    fn a_share_of_the_processors_is_percent_of_one() {
        for (text, percent) in [("1%", 1), ("50%", 50), ("150%", 150), ("3300%", 3300)] {
            assert_eq!(parse_share_percent(text), Ok(percent), "{text}");
        }
        for text in ["", "%", "0%", "50", "0.5", "-1%", "50 %", "3301%", "50%%"] {
            let said = parse_share_percent(text).unwrap_err().to_string();
            assert!(said.ends_with("50% or 150%: 1% to 3300%"), "{text}: {said}");
        }
    }

    #[test]
    fn bounds_of_output_are_bytes_and_disks_have_a_least_size() {
        assert_eq!(parse_bytes("1K"), Ok(1024));
        assert_eq!(parse_bytes("2M"), Ok(2 << 20));
        assert_eq!(parse_bytes("0K"), Err(QuantityError::NotASize));
        assert_eq!(parse_bytes("99999999999999G"), Err(QuantityError::TooLarge));
        assert_eq!(parse_disk_mib("32M"), Ok(32));
        assert_eq!(parse_disk_mib("16384G"), Ok(16 << 20));
        for text in ["0M", "31M", "16385G"] {
            let said = parse_disk_mib(text).unwrap_err().to_string();
            assert_eq!(said, "A disk has 32M to 16384G", "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_quantity_or_an_error(text in "\\PC{0,12}") {
            let _ = parse_timeout(&text);
            let _ = parse_memory_mib(&text);
            let _ = parse_bytes(&text);
        }

        #[test]
        fn hours_minutes_and_seconds_add_up(h in 0u64..100, m in 0u64..100, s in 1u64..100) {
            let read = parse_timeout(&format!("{h}h{m}m{s}s")).unwrap().unwrap();
            prop_assert_eq!(read, Duration::from_secs(h * 3600 + m * 60 + s));
        }

        #[test]
        fn every_number_of_mib_is_read_back(mib: u32) {
            prop_assert_eq!(parse_memory_mib(&format!("{mib}M")), Ok(mib));
        }
    }
}
