//! The ring: a disk's request of 4 KiB, from the notification until it has come back, without any disk.
#![allow(clippy::expect_used, missing_docs, reason = "a measurement")]

use std::hint::black_box;
use std::io;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use devices::block::{Block, Disk};
use sandvmm_benches::{BUFFERS, Guest};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use vm_memory::VolatileSlice;

const SECTORS: u64 = 1 << 20;
const DATA_BYTES: u32 = 4096;

/// Does nothing, and that well.
#[derive(Debug)]
struct NoDisk;

impl Disk for NoDisk {
    fn capacity_sectors(&self) -> u64 {
        SECTORS
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        black_box((offset, slices));
        Ok(())
    }

    fn write_at(&self, offset: u64, slices: &[VolatileSlice<'_>]) -> io::Result<()> {
        black_box((offset, slices));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&self, _offset: u64, _len: u64, _unmap: bool) -> io::Result<()> {
        Ok(())
    }
}

fn requests(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ring");
    group.throughput(Throughput::Elements(1));
    for (name, kind) in [
        ("read 4 KiB", VIRTIO_BLK_T_IN),
        ("write 4 KiB", VIRTIO_BLK_T_OUT),
    ] {
        let block = Block::new(Box::new(NoDisk), *b"bench               ").expect("a descriptor");
        let mut guest = Guest::new(block, 0, 1);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        guest.write(BUFFERS, &header);
        let chain = [
            (BUFFERS, 16, false),
            (BUFFERS + 0x1000, DATA_BYTES, kind == VIRTIO_BLK_T_IN),
            (BUFFERS + 0x800, 1, true),
        ];
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let before = guest.used(0);
                guest.publish(0, &chain);
                guest.serve(0);
                assert_eq!(guest.used(0), before.wrapping_add(1), "it has come back");
            });
        });
    }
    group.finish();
}

criterion_group!(ring, requests);
criterion_main!(ring);
