//! Virtio-block (virtio 1.2 §5.2): one queue of requests to one raw disk.
//!
//! * [`disk`] is what is needed of a disk; the machine implements it for files.
//! * [`request`] makes of a chain a request that can't be wrong, serves it, and writes its status.
//! * Here: the device with its features and its configuration space.
//!
//! Requests are served one after the other on the event-loop thread, so many bytes ([`request::ROUND_BYTES_MAX`]) in a round, after which others
//! have their turn. A reset waits for the round in service.

pub mod disk;
pub mod request;
#[cfg(test)]
pub(crate) mod testing;

use std::io;

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use crate::virtio::{
    Activation, ActivationError, ActiveQueue, Drained, QueueEvents, QueuePosition, VirtioDevice,
    read_config_bytes,
};
pub use disk::{Disk, SECTOR_SIZE};
use request::{
    DISK_ID_LEN, DiskService, Geometry, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT_LEN,
    MAX_SEGMENTS, ROUND_BYTES_MAX,
};

/// Descriptors in the queue: room for 85 requests of one segment, or one of [`MAX_SEGMENTS`].
pub const QUEUE_SIZE: u16 = 256;

/// The logical block size that the driver is told, in bytes: a sector.
const BLOCK_SIZE: u32 = 512;

/// Bytes of the configuration space (virtio 1.2 §5.2.4).
const CONFIG_LEN: usize = 60;

/// Offsets in the configuration space (virtio 1.2 §5.2.4).
mod config_offset {
    pub(super) const CAPACITY: usize = 0;
    pub(super) const SIZE_MAX: usize = 8;
    pub(super) const SEG_MAX: usize = 12;
    pub(super) const BLK_SIZE: usize = 20;
    pub(super) const MAX_DISCARD_SECTORS: usize = 36;
    pub(super) const MAX_DISCARD_SEG: usize = 40;
    pub(super) const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    pub(super) const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    pub(super) const MAX_WRITE_ZEROES_SEG: usize = 52;
    pub(super) const WRITE_ZEROES_MAY_UNMAP: usize = 56;
}

/// A block device over one disk.
#[derive(Debug)]
pub struct Block {
    service: DiskService,
    features: u64,
    config: [u8; CONFIG_LEN],
    queue_events: QueueEvents,
    queue: Option<ActiveQueue>,
    write_through: bool,
}

impl Block {
    /// A device over `disk`; the guest sees `id` as its serial number.
    ///
    /// # Errors
    ///
    /// The system's, when it is out of descriptors.
    pub fn new(disk: Box<dyn Disk>, id: [u8; DISK_ID_LEN]) -> io::Result<Self> {
        let service = DiskService::new(disk, id);
        let geometry = service.geometry();
        let features = if geometry.read_only {
            feature_bits([VIRTIO_BLK_F_RO])
        } else {
            feature_bits([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES])
        };
        Ok(Self {
            features: features
                | feature_bits([
                    VIRTIO_BLK_F_SIZE_MAX,
                    VIRTIO_BLK_F_SEG_MAX,
                    VIRTIO_BLK_F_BLK_SIZE,
                    VIRTIO_BLK_F_FLUSH,
                ]),
            config: config(geometry),
            service,
            queue_events: QueueEvents::new(1)?,
            queue: None,
            write_through: false,
        })
    }

    /// Whether the driver has taken the device into service.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.queue.is_some()
    }

    fn serve(&mut self) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        let (service, write_through) = (&self.service, self.write_through);
        let drained = queue.drain_within(ROUND_BYTES_MAX, |memory, chain| {
            service.serve(memory, chain, write_through)
        });
        match drained {
            Ok(Drained::Empty) => {}
            // Others have their turn first.
            Ok(Drained::BudgetSpent) => self.queue_events.kick(0),
            // The queue has retired and told the driver; a log line would be the guest's to repeat.
            Err(_) => {}
        }
    }
}

fn feature_bits<const N: usize>(features: [u32; N]) -> u64 {
    features
        .into_iter()
        .fold(0, |bits, feature| bits | 1 << feature)
}

/// The configuration space, which never changes. Fields of features that are not offered are 0.
fn config(geometry: Geometry) -> [u8; CONFIG_LEN] {
    let mut config = [0_u8; CONFIG_LEN];
    let mut put = |offset: usize, bytes: &[u8]| {
        if let Some(field) = config.get_mut(offset..offset + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    };
    put(
        config_offset::CAPACITY,
        &geometry.capacity_sectors.to_le_bytes(),
    );
    put(config_offset::SIZE_MAX, &MAX_SEGMENT_LEN.to_le_bytes());
    put(config_offset::SEG_MAX, &MAX_SEGMENTS.to_le_bytes());
    put(config_offset::BLK_SIZE, &BLOCK_SIZE.to_le_bytes());
    if !geometry.read_only {
        let sectors = MAX_RANGE_SECTORS.to_le_bytes();
        let ranges = MAX_RANGES.to_le_bytes();
        put(config_offset::MAX_DISCARD_SECTORS, &sectors);
        put(config_offset::MAX_DISCARD_SEG, &ranges);
        put(
            config_offset::DISCARD_SECTOR_ALIGNMENT,
            &1_u32.to_le_bytes(),
        );
        put(config_offset::MAX_WRITE_ZEROES_SECTORS, &sectors);
        put(config_offset::MAX_WRITE_ZEROES_SEG, &ranges);
        put(config_offset::WRITE_ZEROES_MAY_UNMAP, &[1]);
    }
    config
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_events(&self) -> &QueueEvents {
        &self.queue_events
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivationError> {
        // Without FLUSH the driver has no way to make data durable (virtio 1.2 §5.2.6.2).
        self.write_through = activation.features & feature_bits([VIRTIO_BLK_F_FLUSH]) == 0;
        let [queue] = activation.into_queues()?;
        self.queue = Some(queue);
        Ok(())
    }

    fn reset(&mut self) {
        // Requests are served whole under the device's lock: none is in flight here.
        self.queue = None;
    }

    fn positions(&self) -> Vec<QueuePosition> {
        self.queue.iter().map(ActiveQueue::position).collect()
    }
}

impl MutEventSubscriber for Block {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.queue_events.register(ops);
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        if self.queue_events.take(events.fd()).is_some() {
            self.serve();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_WRITE_ZEROES};
    use vm_memory::{Bytes, GuestAddress, VolatileSlice};

    use super::testing::MemoryDisk;
    use super::*;
    use crate::virtio::testing::{CountingLine, DriverQueue, Piece, memory};

    /// A large disk that counts the bytes it is told to move.
    #[derive(Debug, Clone, Default)]
    struct CountingDisk(Arc<AtomicU64>);

    impl CountingDisk {
        fn count(&self, bytes: u64) -> io::Result<()> {
            self.0.fetch_add(bytes, Ordering::SeqCst);
            Ok(())
        }
    }

    impl Disk for CountingDisk {
        fn capacity_sectors(&self) -> u64 {
            1 << 31
        }

        fn read_only(&self) -> bool {
            false
        }

        fn read_at(&self, _offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
            self.count(slices.iter().map(|slice| slice.len() as u64).sum())
        }

        fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
            self.read_at(offset, slices)
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }

        fn discard(&self, _offset: u64, len: u64) -> io::Result<()> {
            self.count(len)
        }

        fn write_zeroes(&self, _offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
            self.count(len)
        }
    }

    /// What each round moves of a queue that is full of requests: `kind`, with `data` pieces between header and status.
    fn rounds_of(kind: u32, data: &[Piece], chains: u16) -> Vec<u64> {
        const HEADER: u64 = 0x8000;
        let memory = memory(4 << 20);
        let mut driver = DriverQueue::new(&memory, 0x1000, 256);
        let disk = CountingDisk::default();
        let mut block = Block::new(Box::new(disk.clone()), [0; DISK_ID_LEN]).unwrap();
        block.queue = Some(driver.activate(&CountingLine::default().interrupt()));
        memory
            .write_obj([kind, 0, 0, 0], GuestAddress(HEADER))
            .unwrap();
        // Ranges from the beginning of the disk on, as long as they may be.
        for range in 0..MAX_RANGES {
            let at = RANGES + u64::from(range) * 16;
            let range = [0, 0, MAX_RANGE_SECTORS, 0];
            memory.write_obj(range, GuestAddress(at)).unwrap();
        }
        for _ in 0..chains {
            let parts = [Piece::readable(HEADER, 16)];
            let status = [Piece::writable(HEADER + 16, 1)];
            driver.add(&[&parts, data, &status].concat());
        }
        let mut rounds = Vec::new();
        loop {
            let before = disk.0.load(Ordering::SeqCst);
            block.serve();
            rounds.push(disk.0.load(Ordering::SeqCst) - before);
            // Others have their turn before the kick that it gave itself.
            if block.queue_events.iter().all(|event| event.read().is_err()) {
                break;
            }
            assert!(rounds.len() <= usize::from(chains) + 1, "{rounds:?}");
        }
        assert_eq!(driver.used_index(), chains);
        rounds
    }

    const RANGES: u64 = 0x9000;

    #[test]
    fn a_round_moves_a_bounded_number_of_bytes_and_the_next_one_goes_on() {
        let ranges = [Piece::readable(RANGES, MAX_RANGES * 16)];
        let zeroed = u64::from(MAX_RANGES) * u64::from(MAX_RANGE_SECTORS) * SECTOR_SIZE;
        let zeroes = rounds_of(VIRTIO_BLK_T_WRITE_ZEROES, &ranges, 85);

        // Reads of one large piece each.
        let piece = [Piece::writable(0x1_0000, 3 << 20)];
        let reads = rounds_of(VIRTIO_BLK_T_IN, &piece, 85);

        for (rounds, all) in [(zeroes, 85 * zeroed), (reads, 85 * (3 << 20))] {
            assert_eq!(rounds.iter().sum::<u64>(), all);
            assert!(
                rounds.iter().all(|bytes| *bytes < 2 * ROUND_BYTES_MAX),
                "{rounds:?}"
            );
            assert!(rounds.len() > 1, "{rounds:?}");
        }
    }

    fn block(read_only: bool) -> Block {
        let mut disk = MemoryDisk::new(1 << 4);
        disk.read_only = read_only;
        Block::new(Box::new(disk), [0; DISK_ID_LEN]).unwrap()
    }

    fn config_u32(block: &Block, offset: usize) -> u32 {
        let mut field = [0; 4];
        block.read_config(offset as u64, &mut field);
        u32::from_le_bytes(field)
    }

    #[test]
    fn test_read_only_disk_offers_no_way_to_write() {
        let block = block(true);
        assert_ne!(block.features() & 1 << VIRTIO_BLK_F_RO, 0);
        assert_eq!(block.features() & 1 << VIRTIO_BLK_F_DISCARD, 0);
        assert_eq!(block.features() & 1 << VIRTIO_BLK_F_WRITE_ZEROES, 0);
        assert_eq!(config_u32(&block, config_offset::MAX_DISCARD_SECTORS), 0);
    }

    #[test]
    fn test_writable_disk_offers_what_the_requests_allow() {
        let block = block(false);
        assert_eq!(block.features() & 1 << VIRTIO_BLK_F_RO, 0);
        assert_ne!(block.features() & 1 << VIRTIO_BLK_F_DISCARD, 0);
        assert_ne!(block.features() & 1 << VIRTIO_BLK_F_WRITE_ZEROES, 0);
        assert_eq!(
            config_u32(&block, config_offset::MAX_WRITE_ZEROES_SECTORS),
            MAX_RANGE_SECTORS
        );
    }

    /// A chain of header, segments and status fits the queue: else a conforming driver would be stuck.
    #[test]
    fn test_longest_chain_fits_the_queue() {
        let block = block(false);
        let segments = config_u32(&block, config_offset::SEG_MAX);
        assert!(segments + 2 <= u32::from(block.queue_max_sizes()[0]));
        assert_eq!(config_u32(&block, config_offset::BLK_SIZE), BLOCK_SIZE);
        assert_eq!(u64::from(BLOCK_SIZE), SECTOR_SIZE);
    }
}
