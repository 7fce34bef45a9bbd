//! From an address to the device behind it.
//!
//! One [`Bus`] serves port I/O, another memory-mapped I/O. It is filled while the machine is built and shared read-only
//! afterwards, so a look-up takes no lock, and none is held while a device's handler runs.

use std::fmt::Debug;
use std::sync::Arc;

/// What the guest reads where nothing answers: a real bus floats high.
pub const FLOATING: u8 = 0xff;

/// A device's registers, as processors reach them. Called from all vCPU threads at once.
pub trait BusDevice: Debug + Send + Sync {
    /// Fills `data` from the registers at `offset` bytes into the device's range. All of `data` must be filled.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` to the registers at `offset` bytes into the device's range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range can't be added.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BusError {
    /// The range is empty or ends after the last address.
    #[error("The range of {len:#x} bytes at {base:#x} is empty or wraps around")]
    BadRange {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Another device is there.
    #[error("The range of {len:#x} bytes at {base:#x} overlaps the device at {other:#x}")]
    Overlap {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the device that is there.
        other: u64,
    },
}

/// Address ranges and the devices behind them.
#[derive(Debug, Default)]
pub struct Bus {
    /// Sorted by base, disjoint.
    ranges: Vec<Range>,
}

#[derive(Debug)]
struct Range {
    base: u64,
    /// Last address that belongs to the device.
    last: u64,
    device: Arc<dyn BusDevice>,
}

impl Bus {
    /// A bus without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a device at `len` bytes from `base` on.
    ///
    /// # Errors
    ///
    /// [`BusError`] where the range is impossible or taken.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let last = len
            .checked_sub(1)
            .and_then(|span| base.checked_add(span))
            .ok_or(BusError::BadRange { base, len })?;
        if let Some(other) = self
            .ranges
            .iter()
            .find(|range| base <= range.last && range.base <= last)
        {
            return Err(BusError::Overlap {
                base,
                len,
                other: other.base,
            });
        }
        let at = self.ranges.partition_point(|range| range.base < base);
        self.ranges.insert(at, Range { base, last, device });
        Ok(())
    }

    /// Reads from the device at `address`. Where there is none, or the access crosses the end
    /// of its range, all bytes are [`FLOATING`] and the result is false.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address, data.len()) {
            Some((device, offset)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(FLOATING);
                false
            }
        }
    }

    /// Writes to the device at `address`. Where there is none, or the access crosses the end of
    /// its range, the bytes go nowhere and the result is false.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((device, offset)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }

    fn find(&self, address: u64, len: usize) -> Option<(&dyn BusDevice, u64)> {
        let after = self.ranges.partition_point(|range| range.base <= address);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        let last = address.checked_add(u64::try_from(len).ok()?.checked_sub(1)?)?;
        (last <= range.last).then(|| (range.device.as_ref(), address - range.base))
    }
}
