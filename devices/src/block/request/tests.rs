//! Requests of a good driver, of a hostile one, and of random bytes.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::block::testing::MemoryDisk;
use crate::virtio::testing::{CountingLine, DriverQueue, Piece, memory};
use crate::virtio::{ActiveQueue, Drained, VirtioInterrupt};

const MEMORY_LEN: usize = 0x10_0000;
const HEADER: u64 = 0x8000;
const DATA: u64 = 0x1_0000;
const STATUS: u64 = 0x9000;
const CAPACITY: u64 = 16;
/// What the status byte holds before a request.
const UNTOUCHED: u8 = 0xaa;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct Setup {
    memory: GuestMemoryMmap,
    disk: MemoryDisk,
    service: DiskService,
    driver: DriverQueue,
    queue: ActiveQueue,
    interrupt: VirtioInterrupt,
}

fn setup_with(disk: MemoryDisk) -> Setup {
    let memory = memory(MEMORY_LEN);
    let driver = DriverQueue::new(&memory, 0x1000, 16);
    let interrupt = CountingLine::default().interrupt();
    let queue = driver.activate(&interrupt);
    let service = DiskService::new(Box::new(disk.clone()), *b"a-disk-of-20-bytes-!");
    Setup {
        memory,
        disk,
        service,
        driver,
        queue,
        interrupt,
    }
}

fn setup() -> Setup {
    setup_with(MemoryDisk::new(CAPACITY))
}

fn read_only() -> Setup {
    let mut disk = MemoryDisk::new(CAPACITY);
    disk.read_only = true;
    setup_with(disk)
}

impl Setup {
    fn put_header(&self, kind: u32, sector: u64) {
        self.memory
            .write_obj([kind, 0], GuestAddress(HEADER))
            .unwrap();
        self.memory
            .write_obj(sector, GuestAddress(HEADER + 8))
            .unwrap();
    }

    /// Serves one chain of these pieces. The head comes back whatever happens; the result is what was
    /// written at [`STATUS`] and the used length.
    fn serve(&mut self, pieces: &[Piece]) -> (u8, u32) {
        self.memory
            .write_obj(UNTOUCHED, GuestAddress(STATUS))
            .unwrap();
        let head = self.driver.add(pieces);
        let service = &self.service;
        let drained = self
            .queue
            .drain(|memory, chain| service.serve(memory, chain, false).written_bytes)
            .unwrap();
        assert_eq!(drained, Drained::Empty);
        let (used_head, written) = self.driver.take_used().unwrap();
        assert_eq!(used_head, head);
        assert!(self.driver.take_used().is_none());
        assert!(!self.interrupt.needs_reset());
        (self.memory.read_obj(GuestAddress(STATUS)).unwrap(), written)
    }

    fn read(&mut self, sector: u64, len: u32) -> (u8, u32) {
        self.put_header(VIRTIO_BLK_T_IN, sector);
        self.serve(&[
            Piece::readable(HEADER, 16),
            Piece::writable(DATA, len),
            Piece::writable(STATUS, 1),
        ])
    }

    fn send(&mut self, kind: u32, sector: u64, len: u32) -> (u8, u32) {
        self.put_header(kind, sector);
        self.serve(&[
            Piece::readable(HEADER, 16),
            Piece::readable(DATA, len),
            Piece::writable(STATUS, 1),
        ])
    }

    fn put_range(&self, index: u64, sector: u64, sectors: u32, flags: u32) {
        let at = DATA + index * 16;
        self.memory.write_obj(sector, GuestAddress(at)).unwrap();
        self.memory
            .write_obj([sectors, flags], GuestAddress(at + 8))
            .unwrap();
    }

    fn data(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory
            .read_slice(&mut data, GuestAddress(DATA))
            .unwrap();
        data
    }
}

#[test]
fn test_read_gives_the_sectors() {
    let mut s = setup();
    assert_eq!(s.read(3, 1024), (OK, 1025));
    assert_eq!(s.data(1024), s.disk.bytes()[3 * 512..5 * 512]);
}

#[test]
fn test_write_changes_the_sectors_alone() {
    let mut s = setup();
    let before = s.disk.bytes();
    s.memory
        .write_slice(&[0x77; 512], GuestAddress(DATA))
        .unwrap();

    assert_eq!(s.send(VIRTIO_BLK_T_OUT, 15, 512), (OK, 1));

    let after = s.disk.bytes();
    assert_eq!(after[..15 * 512], before[..15 * 512]);
    assert_eq!(after[15 * 512..], [0x77; 512]);
    assert_eq!(s.disk.flushes(), 0);
}

#[test]
fn test_write_through_flushes_after_each_write() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_OUT, 0);
    s.driver.add(&[
        Piece::readable(HEADER, 16),
        Piece::readable(DATA, 512),
        Piece::writable(STATUS, 1),
    ]);
    let chain = s.queue.pop().unwrap().unwrap();

    let served = s.service.serve(&s.memory, &chain, true);

    // How long that takes is not known: the round is over.
    assert_eq!(served.cost, ROUND_BYTES_MAX);

    assert_eq!(s.disk.flushes(), 1);
}

#[test]
fn test_flush_also_on_a_read_only_disk() {
    for mut s in [setup(), read_only()] {
        s.put_header(VIRTIO_BLK_T_FLUSH, 0);
        let outcome = s.serve(&[Piece::readable(HEADER, 16), Piece::writable(STATUS, 1)]);
        assert_eq!(outcome, (OK, 1));
        assert_eq!(s.disk.flushes(), 1);
    }
}

#[test]
fn test_get_id_gives_twenty_bytes() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_GET_ID, 0);
    let outcome = s.serve(&[
        Piece::readable(HEADER, 16),
        Piece::writable(DATA, 20),
        Piece::writable(STATUS, 1),
    ]);
    assert_eq!(outcome, (OK, 21));
    assert_eq!(s.data(21), b"a-disk-of-20-bytes-!\0");
}

#[test]
fn test_get_id_into_less_than_twenty_bytes_is_ioerr() {
    let mut s = setup();
    for len in [0, 1, 19] {
        s.put_header(VIRTIO_BLK_T_GET_ID, 0);
        let outcome = s.serve(&[
            Piece::readable(HEADER, 16),
            Piece::writable(DATA, len),
            Piece::writable(STATUS, 1),
        ]);
        assert_eq!(outcome, (IOERR, 1));
    }
    assert_eq!(s.data(20), [0; 20]);
}

#[test]
fn test_sector_outside_the_disk_is_ioerr() {
    let mut s = setup();
    let before = s.disk.bytes();
    for (sector, len) in [
        (CAPACITY, 512),
        (CAPACITY - 1, 1024),
        (CAPACITY + 1, 512),
        // × 512 wraps to the disk's beginning.
        (1 << 55, 512),
        // The end wraps.
        (u64::MAX, 512),
        (u64::MAX, 1024),
    ] {
        assert_eq!(s.read(sector, len), (IOERR, 1), "{sector:#x}");
        assert_eq!(s.send(VIRTIO_BLK_T_OUT, sector, len), (IOERR, 1));
        s.put_range(0, sector, len / 512, 0);
        assert_eq!(s.send(VIRTIO_BLK_T_DISCARD, 0, 16), (IOERR, 1));
        assert_eq!(s.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16), (IOERR, 1));
    }
    assert_eq!(s.disk.bytes(), before);
}

#[test]
fn test_length_that_is_no_sector_is_ioerr() {
    let mut s = setup();
    for len in [0, 1, 511, 513] {
        assert_eq!(s.read(0, len), (IOERR, 1), "{len}");
        assert_eq!(s.send(VIRTIO_BLK_T_OUT, 0, len), (IOERR, 1), "{len}");
    }
}

#[test]
fn test_longest_request_of_a_conforming_driver_is_allowed_and_one_more_sector_is_ioerr() {
    let geometry = Geometry {
        capacity_sectors: u64::MAX,
        read_only: false,
    };
    assert!(data_range(0, MAX_DATA_LEN, geometry).is_ok_and(|range| range.len == MAX_DATA_LEN));
    assert_eq!(
        data_range(0, MAX_DATA_LEN + 512, geometry),
        Err(Refusal::IoError)
    );
}

#[test]
fn test_four_gib_in_one_chain_is_ioerr() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_IN, 0);
    let mut pieces = vec![Piece::readable(HEADER, 16)];
    pieces.extend([Piece::writable(DATA, u32::MAX); 13]);
    pieces.push(Piece::writable(STATUS, 1));
    assert_eq!(s.serve(&pieces), (IOERR, 1));
}

#[test]
fn test_writes_to_a_read_only_disk_are_ioerr() {
    let mut s = read_only();
    s.put_range(0, 0, 1, 0);
    for (kind, len) in [
        (VIRTIO_BLK_T_OUT, 512),
        (VIRTIO_BLK_T_DISCARD, 16),
        (VIRTIO_BLK_T_WRITE_ZEROES, 16),
    ] {
        assert_eq!(s.send(kind, 0, len), (IOERR, 1));
    }
    assert_eq!(s.read(0, 512), (OK, 513));
}

#[test]
fn test_status_that_cannot_be_written_returns_the_head_and_does_nothing() {
    let mut s = setup();
    let before = s.disk.bytes();
    s.put_header(VIRTIO_BLK_T_OUT, 0);
    for status in [
        Piece::readable(STATUS, 1),
        Piece::writable(STATUS, 0),
        Piece::writable(u64::MAX, 1),
        Piece::writable(0x10_0000, 1),
    ] {
        let outcome = s.serve(&[
            Piece::readable(HEADER, 16),
            Piece::readable(DATA, 512),
            status,
        ]);
        assert_eq!(outcome, (UNTOUCHED, 0));
    }
    assert_eq!(s.disk.bytes(), before);
}

#[test]
fn test_header_split_over_descriptors_works() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_IN, 2);
    let outcome = s.serve(&[
        Piece::readable(HEADER, 1),
        Piece::readable(HEADER + 1, 0),
        Piece::readable(HEADER + 1, 10),
        Piece::readable(HEADER + 11, 5),
        Piece::writable(DATA, 100),
        Piece::writable(DATA + 100, 412),
        Piece::writable(STATUS, 1),
    ]);
    assert_eq!(outcome, (OK, 513));
    assert_eq!(s.data(512), [3; 512]);
}

#[test]
fn test_data_and_status_in_one_descriptor_work() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_IN, 0);
    s.serve(&[Piece::readable(HEADER, 16), Piece::writable(DATA, 513)]);
    assert_eq!(s.data(513)[..512], [1; 512]);
    assert_eq!(s.data(513)[512], OK);
}

#[test]
fn test_header_that_is_short_or_writable_or_not_memory_is_ioerr() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_IN, 0);
    for header in [
        Piece::readable(HEADER, 0),
        Piece::readable(HEADER, 15),
        Piece::writable(HEADER, 16),
        Piece::readable(u64::MAX - 3, 16),
    ] {
        let outcome = s.serve(&[
            header,
            Piece::writable(DATA, 512),
            Piece::writable(STATUS, 1),
        ]);
        assert_eq!(outcome, (IOERR, 1));
    }
    assert_eq!(s.data(512), [0; 512]);
}

#[test]
fn test_writable_header_before_readable_data_is_ioerr() {
    let mut s = setup();
    s.put_header(VIRTIO_BLK_T_OUT, 0);
    let outcome = s.serve(&[
        Piece::writable(HEADER, 16),
        Piece::readable(DATA, 512),
        Piece::writable(STATUS, 1),
    ]);
    assert_eq!(outcome, (IOERR, 1));
}

#[test]
fn test_unknown_and_scsi_types_are_unsupported() {
    let mut s = setup();
    for kind in [
        2,
        3,
        5,
        6,
        7,
        9,
        10,
        12,
        14,
        15,
        16,
        24,
        0x8000_0000,
        u32::MAX,
    ] {
        assert_eq!(s.send(kind, 0, 512), (UNSUPP, 1), "{kind:#x}");
    }
}

#[test]
fn test_discard_and_write_zeroes_change_their_ranges_alone() {
    let mut s = setup();
    s.put_range(0, 1, 2, 0);
    s.put_range(1, 9, 1, 0);
    assert_eq!(s.send(VIRTIO_BLK_T_DISCARD, 0, 32), (OK, 1));
    s.put_range(0, 15, 1, 1);
    assert_eq!(s.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16), (OK, 1));

    let mut expected = MemoryDisk::new(CAPACITY).bytes();
    expected[512..3 * 512].fill(0xdd);
    expected[9 * 512..10 * 512].fill(0xdd);
    expected[15 * 512..].fill(0);
    assert_eq!(s.disk.bytes(), expected);
}

#[test]
fn test_bad_second_range_leaves_the_first_alone() {
    let mut s = setup();
    s.put_range(0, 0, 1, 0);
    s.put_range(1, CAPACITY, 1, 0);
    assert_eq!(s.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, 32), (IOERR, 1));
    assert_eq!(s.disk.bytes(), MemoryDisk::new(CAPACITY).bytes());
}

#[test]
fn test_flags_of_ranges_that_are_not_known_are_unsupported() {
    let mut s = setup();
    for (kind, flags) in [
        (VIRTIO_BLK_T_DISCARD, 1),
        (VIRTIO_BLK_T_DISCARD, 2),
        (VIRTIO_BLK_T_WRITE_ZEROES, 2),
        (VIRTIO_BLK_T_WRITE_ZEROES, u32::MAX),
    ] {
        s.put_range(0, 0, 1, flags);
        assert_eq!(s.send(kind, 0, 16), (UNSUPP, 1));
    }
}

#[test]
fn test_count_of_ranges_that_is_none_partial_or_too_many_is_ioerr() {
    let mut s = setup();
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        for len in [0, 1, 15, 17, (MAX_RANGES + 1) * 16, u32::MAX, u32::MAX - 15] {
            assert_eq!(s.send(kind, 0, len), (IOERR, 1), "{len}");
        }
    }
}

#[test]
fn test_most_ranges_are_allowed_and_one_more_is_ioerr() {
    let mut s = setup();
    for index in 0..=u64::from(MAX_RANGES) {
        s.put_range(index, index % CAPACITY, 1, 0);
    }
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(s.send(kind, 0, MAX_RANGES * 16), (OK, 1));
        assert_eq!(s.send(kind, 0, (MAX_RANGES + 1) * 16), (IOERR, 1));
    }
}

#[test]
fn test_range_of_no_or_too_many_sectors_is_ioerr() {
    let mut s = setup_with(MemoryDisk::new(1));
    for sectors in [0, MAX_RANGE_SECTORS + 1, u32::MAX] {
        s.put_range(0, 0, sectors, 0);
        assert_eq!(s.send(VIRTIO_BLK_T_DISCARD, 0, 16), (IOERR, 1));
        assert_eq!(s.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, 16), (IOERR, 1));
    }
}

#[test]
fn test_disk_that_is_cut_short_is_ioerr_and_works_on() {
    let mut s = setup();
    s.disk.cut(5 * 512);
    assert_eq!(s.read(5, 512), (IOERR, 1));
    assert_eq!(s.send(VIRTIO_BLK_T_OUT, 4, 1024), (IOERR, 1));
    assert_eq!(s.read(4, 512), (OK, 513));
}

proptest! {
    /// Whatever the header and the shape of the chain: the head comes back once, the status is one of
    /// three, and a read-only disk does not change.
    #[test]
    fn prop_random_requests_have_an_outcome(
        header in any::<[u8; 16]>(),
        kind in prop_oneof![0_u32..16, any::<u32>()],
        sector in prop_oneof![0_u64..20, any::<u64>()],
        sensible in any::<bool>(),
        data in proptest::collection::vec(any::<u8>(), 64),
        pieces in proptest::collection::vec(
            (prop_oneof![Just(HEADER), Just(DATA), any::<u64>()],
             prop_oneof![Just(16_u32), Just(512), 0_u32..2000, any::<u32>()],
             any::<bool>()),
            0..6),
        is_read_only in any::<bool>(),
    ) {
        let mut s = if is_read_only { read_only() } else { setup() };
        s.memory.write_slice(&header, GuestAddress(HEADER)).unwrap();
        if sensible {
            s.put_header(kind, sector);
        }
        s.memory.write_slice(&data, GuestAddress(DATA)).unwrap();
        let mut chain = vec![Piece::readable(HEADER, 16)];
        chain.extend(pieces.into_iter().map(|(address, len, writable)| {
            // The status byte must not be where the data goes, or it would be overwritten.
            let address = if address.abs_diff(STATUS) < 1 << 32 { DATA } else { address };
            Piece { address, len: len.min(0x8000), writable }
        }));
        chain.push(Piece::writable(STATUS, 1));

        let (status, written) = s.serve(&chain);

        prop_assert!([OK, IOERR, UNSUPP].contains(&status));
        prop_assert!(written >= 1);
        prop_assert!(u64::from(written) <= MAX_DATA_LEN + 1);
        if is_read_only {
            prop_assert_eq!(s.disk.bytes(), MemoryDisk::new(CAPACITY).bytes());
        }
    }

    /// What passes the check lies in the disk.
    #[test]
    fn prop_checked_range_lies_in_the_disk(
        sector in any::<u64>(),
        len in any::<u64>(),
        capacity_sectors in 0..=u64::MAX / SECTOR_SIZE,
        near in any::<bool>(),
    ) {
        let sector = if near { sector % (capacity_sectors + 2) } else { sector };
        let len = if near { len % 4 * SECTOR_SIZE } else { len };
        let geometry = Geometry { capacity_sectors, read_only: false };
        if let Ok(range) = DiskRange::check(sector, len, geometry) {
            prop_assert_eq!(range.offset, sector * SECTOR_SIZE);
            prop_assert!(range.len > 0 && range.len.is_multiple_of(SECTOR_SIZE));
            prop_assert!(range.offset.checked_add(range.len).unwrap() <= capacity_sectors * SECTOR_SIZE);
        }
    }
}
