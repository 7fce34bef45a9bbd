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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    /// Reads give the offset; writes are kept.
    #[derive(Debug, Default)]
    struct Echo {
        written: Mutex<Vec<(u64, Vec<u8>)>>,
    }

    impl BusDevice for Echo {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset.to_le_bytes()[0]);
        }

        fn write(&self, offset: u64, data: &[u8]) {
            crate::lock(&self.written).push((offset, data.to_vec()));
        }
    }

    #[test]
    fn test_access_reaches_the_device_with_its_offset() {
        let device = Arc::new(Echo::default());
        let mut bus = Bus::new();
        bus.insert(0x60, 5, Arc::new(Echo::default())).unwrap();
        bus.insert(0x3f8, 8, device.clone()).unwrap();
        let mut data = [0; 2];

        assert!(bus.read(0x3fe, &mut data));
        assert!(bus.write(0x3f8, &[1, 2]));

        assert_eq!(data, [6, 6]);
        assert_eq!(*crate::lock(&device.written), [(0, vec![1, 2])]);
    }

    #[test]
    fn test_access_to_nothing_or_over_an_end_floats() {
        let mut bus = Bus::new();
        bus.insert(0x100, 8, Arc::new(Echo::default())).unwrap();
        bus.insert(0x108, 8, Arc::new(Echo::default())).unwrap();
        bus.insert(u64::MAX - 3, 4, Arc::new(Echo::default()))
            .unwrap();
        for (address, len) in [
            (0, 1),
            (0xff, 1),
            (0xff, 2),
            (0x106, 4),
            (0x110, 1),
            (0x100, 0),
            (u64::MAX - 4, 1),
            (u64::MAX, 2),
        ] {
            let mut data = vec![0; len];
            assert!(!bus.read(address, &mut data), "{address:#x}");
            assert!(data.iter().all(|byte| *byte == FLOATING));
            assert!(!bus.write(address, &data));
        }
        assert!(bus.read(u64::MAX, &mut [0]));
    }

    #[test]
    fn test_insert_overlapping_range_returns_overlap() {
        let mut bus = Bus::new();
        bus.insert(0x100, 0x10, Arc::new(Echo::default())).unwrap();
        for (base, len) in [
            (0x100, 0x10),
            (0x10f, 1),
            (0xff, 2),
            (0, u64::MAX),
            (0x104, 2),
        ] {
            assert_eq!(
                bus.insert(base, len, Arc::new(Echo::default())),
                Err(BusError::Overlap {
                    base,
                    len,
                    other: 0x100
                })
            );
        }
        bus.insert(0xff, 1, Arc::new(Echo::default())).unwrap();
        bus.insert(0x110, 1, Arc::new(Echo::default())).unwrap();
    }

    #[test]
    fn test_insert_empty_or_wrapping_range_returns_bad_range() {
        let mut bus = Bus::new();
        for (base, len) in [(0, 0), (u64::MAX, 2), (1, u64::MAX), (u64::MAX, 0)] {
            let result = bus.insert(base, len, Arc::new(Echo::default()));
            assert!(matches!(result, Ok(()) | Err(BusError::BadRange { .. })));
            assert_eq!(
                result.is_ok(),
                len != 0 && base.checked_add(len - 1).is_some(),
                "{base:#x} {len:#x}"
            );
        }
    }

    /// Waits in its handler until it is told to go on.
    #[derive(Debug)]
    struct Slow {
        entered: mpsc::SyncSender<()>,
        go_on: Mutex<mpsc::Receiver<()>>,
    }

    impl BusDevice for Slow {
        fn read(&self, _offset: u64, _data: &mut [u8]) {
            self.entered.send(()).unwrap();
            crate::lock(&self.go_on).recv().unwrap();
        }

        fn write(&self, _offset: u64, _data: &[u8]) {}
    }

    #[test]
    fn test_slow_handler_does_not_hold_up_other_devices() {
        let (entered, is_entered) = mpsc::sync_channel(0);
        let (go_on, receiver) = mpsc::channel();
        let mut bus = Bus::new();
        bus.insert(0, 1, Arc::new(Echo::default())).unwrap();
        bus.insert(
            1,
            1,
            Arc::new(Slow {
                entered,
                go_on: Mutex::new(receiver),
            }),
        )
        .unwrap();

        std::thread::scope(|scope| {
            scope.spawn(|| bus.read(1, &mut [0]));
            is_entered.recv().unwrap();
            assert!(bus.read(0, &mut [0]), "while the other handler runs");
            go_on.send(()).unwrap();
        });
    }
}
