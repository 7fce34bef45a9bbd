//! The packet path: a stream's data from the guest, and to it, each in one packet.
#![allow(clippy::expect_used, missing_docs, reason = "a measurement")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use devices::vsock::{Incoming, Refused, Vsock};
use sandvmm_benches::{BUFFERS, Guest};

/// The queues, and what stands in a header (virtio 1.2 §5.10).
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const QUEUES: u16 = 3;
/// VIRTIO_VSOCK_F_STREAM.
const STREAMS: u32 = 1;
const HEADER_BYTES: u32 = 44;
const GUEST_CID: u64 = 3;
const HOST_CID: u64 = 2;
const STREAM: u16 = 1;
const REQUEST: u16 = 1;
const DATA: u16 = 5;
const CREDIT_UPDATE: u16 = 6;

const GUEST_PORT: u32 = 1024;
const HOST_PORT: u32 = 7;
const PAYLOAD_BYTES: u32 = 4096;

/// Room that the guest says it has.
const ROOM: u32 = 1 << 20;

/// Where the guest takes packets.
const RECEIVED: u64 = BUFFERS + 0x4000;

#[derive(Debug, Clone, Default)]
struct Host(Arc<Mutex<Option<UnixStream>>>);

impl Incoming for Host {
    fn accept(&mut self, stream: UnixStream, _: u32, _: u32) -> Result<(), Refused> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
        Ok(())
    }
}

struct Line {
    guest: Guest<Vsock>,
    host: UnixStream,
    /// Bytes that the guest has taken.
    taken: u32,
}

impl Line {
    fn open() -> Self {
        let host = Host::default();
        let device = Vsock::new(3, Box::new(host.clone())).expect("a descriptor");
        let mut guest = Guest::new(device, STREAMS, QUEUES);
        send(&mut guest, REQUEST, 0, 0);
        give_buffer(&mut guest);
        let stream = host.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Self {
            guest,
            host: stream.expect("the host has accepted"),
            taken: 0,
        }
    }

    /// From the guest's memory until the host's program has it.
    fn leave(&mut self, sink: &mut [u8]) {
        send(&mut self.guest, DATA, PAYLOAD_BYTES, self.taken);
        self.host.read_exact(sink).expect("what was sent");
        // What the host has read is told to the guest now and then, in a packet.
        while self.guest.turn() {}
    }

    /// From the host's program until the guest has it.
    fn arrive(&mut self, bytes: &[u8]) {
        let before = self.guest.used(RECEIVE);
        self.host.write_all(bytes).expect("room");
        give_buffer(&mut self.guest);
        while self.guest.turn() {}
        assert_ne!(self.guest.used(RECEIVE), before, "it has come");
        self.taken = self.taken.wrapping_add(PAYLOAD_BYTES);
        send(&mut self.guest, CREDIT_UPDATE, 0, self.taken);
    }
}

fn send(guest: &mut Guest<Vsock>, operation: u16, payload: u32, taken: u32) {
    let mut header = Vec::new();
    header.extend(GUEST_CID.to_le_bytes());
    header.extend(HOST_CID.to_le_bytes());
    header.extend(GUEST_PORT.to_le_bytes());
    header.extend(HOST_PORT.to_le_bytes());
    header.extend(payload.to_le_bytes());
    header.extend(STREAM.to_le_bytes());
    header.extend(operation.to_le_bytes());
    header.extend(0_u32.to_le_bytes());
    header.extend(ROOM.to_le_bytes());
    header.extend(taken.to_le_bytes());
    guest.write(BUFFERS, &header);
    let before = guest.used(TRANSMIT);
    guest.publish(TRANSMIT, &[(BUFFERS, HEADER_BYTES + payload, false)]);
    guest.serve(TRANSMIT);
    assert_ne!(guest.used(TRANSMIT), before, "it was taken");
}

fn give_buffer(guest: &mut Guest<Vsock>) {
    guest.publish(RECEIVE, &[(RECEIVED, HEADER_BYTES + PAYLOAD_BYTES, true)]);
    guest.serve(RECEIVE);
}

fn packets(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("packet");
    group.throughput(Throughput::Bytes(PAYLOAD_BYTES.into()));
    let mut bytes = vec![7; PAYLOAD_BYTES as usize];
    group.bench_function("4 KiB to the guest", |bencher| {
        let mut line = Line::open();
        bencher.iter(|| line.arrive(&bytes));
    });
    group.bench_function("4 KiB from the guest", |bencher| {
        let mut line = Line::open();
        bencher.iter(|| {
            line.leave(&mut bytes);
            // A place for the next packet of credit, where one has come.
            if line.guest.is_all_back(RECEIVE) {
                give_buffer(&mut line.guest);
            }
        });
    });
    group.finish();
}

criterion_group!(packet, packets);
criterion_main!(packet);
