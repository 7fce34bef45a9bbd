//! A model: any number of connections, any order of what both sides and the driver may do. Every byte arrives in order or its
//! stream was ended by someone, every end of file is right, and at the end nothing is left.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::super::limits::Limits;
use super::super::packet::{HEADER_BYTES, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::guest::{Machine, narrow_pair, packet};

/// Small enough that every bound is met in a few steps.
const LIMITS: Limits = Limits {
    connections: 6,
    // Above what the steps can ask for: one that is dropped is a connect without an answer, by design.
    resets: 300,
    max_buffer_bytes: 600,
    min_buffer_bytes: 16,
    buffer_budget_bytes: 3000,
    packet_bytes: 50,
    packets_per_round: 5,
};

const BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// One thing that happens; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    GuestConnects,
    HostConnects,
    GuestAnswers(usize, bool),
    GuestSends(usize, usize, usize),
    GuestReads(usize, usize),
    GuestShuts(usize, u32),
    HostWrites(usize, usize),
    HostReads(usize, usize),
    HostShutsWrite(usize),
    HostCloses(usize),
    Buffers(usize),
    Turns(usize),
    GuestLooks,
}

fn any_step() -> impl Strategy<Value = Step> {
    let who = 0..8_usize;
    prop_oneof![
        1 => Just(Step::GuestConnects),
        1 => Just(Step::HostConnects),
        2 => (who.clone(), any::<bool>()).prop_map(|(who, yes)| Step::GuestAnswers(who, yes)),
        5 => (who.clone(), 1..400_usize, 0..40_usize).prop_map(|(who, len, cut)| Step::GuestSends(who, len, cut)),
        4 => (who.clone(), 1..300_usize).prop_map(|(who, len)| Step::GuestReads(who, len)),
        1 => (who.clone(), 1..4_u32).prop_map(|(who, flags)| Step::GuestShuts(who, flags)),
        5 => (who.clone(), 1..400_usize).prop_map(|(who, len)| Step::HostWrites(who, len)),
        4 => (who.clone(), 1..300_usize).prop_map(|(who, len)| Step::HostReads(who, len)),
        1 => who.clone().prop_map(Step::HostShutsWrite),
        1 => who.prop_map(Step::HostCloses),
        4 => (0..5_usize).prop_map(Step::Buffers),
        3 => (0..4_usize).prop_map(Step::Turns),
        4 => Just(Step::GuestLooks),
    ]
}

/// The byte at a place of a stream.
fn byte(stream: usize, from_guest: bool, at: usize) -> u8 {
    (at * 31 + stream * 7 + usize::from(from_guest) * 131 + (at >> 8)).to_le_bytes()[0]
}

fn bytes(stream: usize, from_guest: bool, at: usize, len: usize) -> Vec<u8> {
    (at..at + len)
        .map(|at| byte(stream, from_guest, at))
        .collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Who connected has no answer.
    None,
    Accepted,
    Refused,
}

/// One connection as both ends see it.
#[derive(Debug)]
struct Stream {
    number: usize,
    guest_port: u32,
    host_port: Option<u32>,
    by_host: bool,
    answer: Answer,
    host: Option<UnixStream>,
    host_wrote: usize,
    host_read: usize,
    host_eof: bool,
    host_shut: bool,
    guest_sent: usize,
    guest_got: usize,
    guest_read: usize,
    guest_buffer: usize,
    guest_shut: u32,
    /// What the device said that its side is done with.
    device_shut: u32,
    reset: bool,
    promised: u32,
    forwarded: u32,
}

impl Stream {
    fn header(&self, op: Op) -> Header {
        Header {
            buf_alloc: u32::try_from(self.guest_buffer).unwrap(),
            fwd_cnt: u32::try_from(self.guest_read).unwrap(),
            ..packet(op, self.guest_port, self.host_port.unwrap_or(0))
        }
    }

    fn is_open(&self) -> bool {
        self.answer == Answer::Accepted && !self.reset
    }

    /// What the guest may send now.
    fn room(&self) -> usize {
        let in_flight = u32::try_from(self.guest_sent).unwrap() - self.forwarded;
        (self.promised - in_flight) as usize
    }

    fn host_reads(&mut self, most: usize) {
        let Some(host) = &mut self.host else { return };
        let mut chunk = vec![0; most];
        match host.read(&mut chunk) {
            Ok(0) => self.host_eof = true,
            Ok(count) => {
                assert_eq!(
                    chunk[..count],
                    bytes(self.number, true, self.host_read, count)
                );
                self.host_read += count;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

struct World {
    machine: Machine,
    streams: Vec<Stream>,
    by_host_port: HashMap<u32, usize>,
    guest_buffer: usize,
}

impl World {
    fn stream(&mut self, guest_port: u32, by_host: bool) -> &mut Stream {
        let number = self.streams.len();
        self.streams.push(Stream {
            number,
            guest_port,
            host_port: None,
            by_host,
            answer: Answer::None,
            host: None,
            host_wrote: 0,
            host_read: 0,
            host_eof: false,
            host_shut: false,
            guest_sent: 0,
            guest_got: 0,
            guest_read: 0,
            guest_buffer: self.guest_buffer,
            guest_shut: 0,
            device_shut: 0,
            reset: false,
            promised: 0,
            forwarded: 0,
        });
        self.streams.last_mut().unwrap()
    }

    fn step(&mut self, step: &Step) {
        let count = self.streams.len();
        let pick = |who: &usize| (count > 0).then(|| count - 1 - who % count);
        match step {
            Step::GuestConnects => {
                let port = u32::try_from(count).unwrap() + 5000;
                let stream = self.stream(port, false);
                stream.host_port = Some(7);
                let header = stream.header(Op::Request);
                self.machine.transmit(&header, b"");
            }
            Step::HostConnects => {
                let port = u32::try_from(count).unwrap() + 5000;
                let (ours, theirs) = narrow_pair();
                ours.set_nonblocking(true).unwrap();
                let connected = self.machine.device.lock().unwrap().connect(port, theirs);
                if connected.is_ok() {
                    self.stream(port, true).host = Some(ours);
                }
            }
            Step::GuestAnswers(who, yes) => {
                let Some(at) = pick(who) else { return };
                let stream = &mut self.streams[at];
                if stream.by_host && stream.host_port.is_some() && stream.answer == Answer::None {
                    let op = if *yes { Op::Response } else { Op::Reset };
                    stream.answer = if *yes {
                        Answer::Accepted
                    } else {
                        Answer::Refused
                    };
                    let header = stream.header(op);
                    self.machine.transmit(&header, b"");
                }
            }
            Step::GuestSends(who, len, cut) => {
                let Some(at) = pick(who) else { return };
                self.guest_sends(at, *len, *cut);
            }
            Step::GuestReads(who, most) => {
                let Some(at) = pick(who) else { return };
                self.guest_reads(at, *most);
            }
            Step::GuestShuts(who, flags) => {
                let Some(at) = pick(who) else { return };
                self.guest_shuts(at, *flags);
            }
            Step::HostWrites(who, len) => {
                let Some(at) = pick(who) else { return };
                let stream = &mut self.streams[at];
                if let Some(host) = stream.host.as_mut().filter(|_| !stream.host_shut)
                    && let Ok(count) =
                        host.write(&bytes(stream.number, false, stream.host_wrote, *len))
                {
                    stream.host_wrote += count;
                }
            }
            Step::HostReads(who, most) => {
                let Some(at) = pick(who) else { return };
                self.streams[at].host_reads(*most);
            }
            Step::HostShutsWrite(who) => {
                let Some(at) = pick(who) else { return };
                let stream = &mut self.streams[at];
                if let Some(host) = &stream.host {
                    host.shutdown(Shutdown::Write).unwrap();
                    stream.host_shut = true;
                }
            }
            Step::HostCloses(who) => {
                let Some(at) = pick(who) else { return };
                self.streams[at].host = None;
            }
            Step::Buffers(count) => self.machine.post(*count),
            Step::Turns(count) => {
                self.machine.turns(*count);
            }
            Step::GuestLooks => self.guest_looks(),
        }
        self.host_accepts();
        assert!(self.machine.connection_count() <= LIMITS.connections);
    }

    fn host_accepts(&mut self) {
        let accepted = std::mem::take(&mut self.machine.host.lock().unwrap().accepted);
        for (host, _, guest_port) in accepted {
            host.set_nonblocking(true).unwrap();
            let at = self
                .streams
                .iter()
                .position(|stream| stream.guest_port == guest_port);
            self.streams[at.unwrap()].host = Some(host);
        }
    }

    fn guest_sends(&mut self, at: usize, len: usize, cut: usize) {
        let stream = &mut self.streams[at];
        let stopped =
            stream.guest_shut & SHUTDOWN_SEND != 0 || stream.device_shut & SHUTDOWN_RECEIVE != 0;
        let len = len.min(stream.room());
        if !stream.is_open() || stopped || len == 0 {
            return;
        }
        let payload = bytes(stream.number, true, stream.guest_sent, len);
        stream.guest_sent += len;
        let header = Header {
            len: u32::try_from(len).unwrap(),
            ..stream.header(Op::Data)
        };
        self.machine.transmit_pieces(&header, &payload, &[cut, cut]);
    }

    fn guest_reads(&mut self, at: usize, most: usize) {
        let stream = &mut self.streams[at];
        let count = most.min(stream.guest_got - stream.guest_read);
        stream.guest_read += count;
        if count > 0 && stream.is_open() && stream.guest_shut != BOTH {
            let header = stream.header(Op::CreditUpdate);
            self.machine.transmit(&header, b"");
        }
    }

    fn guest_shuts(&mut self, at: usize, flags: u32) {
        let stream = &mut self.streams[at];
        if stream.is_open() && stream.guest_shut | flags != stream.guest_shut {
            stream.guest_shut |= flags;
            let header = Header {
                flags: stream.guest_shut,
                ..stream.header(Op::Shutdown)
            };
            self.machine.transmit(&header, b"");
        }
    }

    /// Takes the packets that came, and checks each against what may come.
    fn guest_looks(&mut self) {
        for (header, payload) in self.machine.packets() {
            let op = header.operation().unwrap();
            let found = self
                .streams
                .iter()
                .position(|stream| stream.guest_port == header.dst_port);
            let stream = &mut self.streams[found.unwrap()];
            if op == Op::Request {
                assert!(stream.by_host && stream.host_port.is_none());
                assert_eq!(
                    self.by_host_port.insert(header.src_port, stream.number),
                    None
                );
                stream.host_port = Some(header.src_port);
            }
            assert_eq!(stream.host_port, Some(header.src_port));
            if op == Op::Reset {
                if stream.answer == Answer::None {
                    stream.answer = Answer::Refused;
                }
                stream.reset = true;
                continue;
            }
            assert!(!stream.reset, "{op:?} after the reset: {stream:?}");
            (stream.promised, stream.forwarded) = (header.buf_alloc, header.fwd_cnt);
            assert!(header.fwd_cnt as usize <= stream.guest_sent);
            match op {
                Op::Response => {
                    assert!(!stream.by_host && stream.answer == Answer::None);
                    stream.answer = Answer::Accepted;
                }
                Op::Data => {
                    assert!(stream.device_shut & SHUTDOWN_SEND == 0);
                    assert!(
                        payload == bytes(stream.number, false, stream.guest_got, payload.len())
                    );
                    assert!(payload.len() as u64 <= LIMITS.packet_bytes);
                    stream.guest_got += payload.len();
                    assert!(stream.guest_got - stream.guest_read <= stream.guest_buffer);
                }
                Op::Shutdown => stream.device_shut |= header.flags,
                _ => {}
            }
        }
    }

    /// Lets everything that is under way arrive; both sides read all.
    fn flow(&mut self) {
        loop {
            let before = self.progress();
            for _ in 0..3 {
                self.machine.post(usize::MAX);
                self.guest_looks();
                self.host_accepts();
                for at in 0..self.streams.len() {
                    self.guest_reads(at, usize::MAX);
                    self.streams[at].host_reads(1 << 16);
                }
                self.machine.settle();
            }
            if self.progress() == before {
                return;
            }
        }
    }

    fn progress(&self) -> Vec<(usize, usize, bool, bool, u32, Answer)> {
        let each = |stream: &Stream| {
            let Stream {
                host_read,
                guest_read,
                host_eof,
                reset,
                device_shut,
                answer,
                ..
            } = *stream;
            (host_read, guest_read, host_eof, reset, device_shut, answer)
        };
        self.streams.iter().map(each).collect()
    }

    /// After [`Self::flow`]: nothing is stuck.
    fn check_all_arrived(&self) {
        for stream in &self.streams {
            assert!(
                stream.by_host || stream.answer != Answer::None,
                "{stream:?}"
            );
            if stream.answer != Answer::Accepted {
                assert!(
                    stream.answer == Answer::None || stream.host.is_none() || stream.host_eof,
                    "{stream:?}"
                );
                continue;
            }
            let guest_reads = stream.guest_shut & SHUTDOWN_RECEIVE == 0;
            let guest_ended = stream.guest_shut & SHUTDOWN_SEND != 0;
            if stream.host.is_some() {
                assert_eq!(stream.host_read, stream.guest_sent, "{stream:?}");
                assert_eq!(stream.host_eof, guest_ended, "{stream:?}");
            } else {
                assert!(!guest_reads || stream.reset, "{stream:?}");
            }
            if guest_reads {
                assert_eq!(stream.guest_read, stream.host_wrote, "{stream:?}");
                let ended = stream.host_shut || stream.host.is_none();
                let told = stream.device_shut & SHUTDOWN_SEND != 0 || stream.reset;
                assert_eq!(told, ended, "{stream:?}");
            }
            if stream.guest_shut == BOTH {
                assert!(stream.reset, "{stream:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_in_order_and_nothing_is_left(
        guest_buffer in 1..200_usize,
        rx_room in 1..80_u32,
        rx_cut in 0..HEADER_BYTES + 80,
        steps in proptest::collection::vec(any_step(), 1..300),
    ) {
        let mut machine = Machine::with(LIMITS, 8, HEADER_BYTES + rx_room);
        machine.rx_cut = rx_cut % (HEADER_BYTES + rx_room);
        let mut world = World { machine, streams: Vec::new(), by_host_port: HashMap::new(), guest_buffer };
        for step in &steps {
            world.step(step);
        }
        world.flow();
        world.check_all_arrived();

        // The host lets go of all, the guest answers what it still owes.
        for at in 0..world.streams.len() {
            world.streams[at].host = None;
            world.step(&Step::GuestAnswers(world.streams.len() - 1 - at, at % 2 == 0));
        }
        world.flow();
        world.check_all_arrived();
        for at in 0..world.streams.len() {
            world.guest_shuts(at, BOTH);
        }
        world.flow();

        prop_assert_eq!(world.machine.connection_count(), 0);
        prop_assert_eq!(world.machine.budget_bytes(), LIMITS.buffer_budget_bytes);
        prop_assert_eq!(world.machine.turns(10), 0);
    }
}
