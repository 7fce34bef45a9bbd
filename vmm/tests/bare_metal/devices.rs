//! What a guest reaches through ports and memory-mapped registers.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sandvmm_vmm::control::{ControlSocket, EndReason, FromMachine, ToMachine};

use crate::guest::{file, kvm_or_skip};
use crate::script::{Descriptor, Queue, Step, guest, notify, register, start_device};

/// Where tests put buffers.
const BUFFER: u64 = 0x40_0000;

/// Where tests put queues.
const QUEUES: u64 = 0x50_0000;

fn word(value: u32) -> [u8; 4] {
    value.to_le_bytes()
}

#[test]
fn the_registers_of_a_device_identify_it() {
    let kvm = kvm_or_skip!("the_registers_of_a_device_identify_it");
    let steps = [
        Step::PrintRegister(register(0, 0x00)),
        Step::PrintRegister(register(0, 0x04)),
        Step::PrintRegister(register(0, 0x08)),
        Step::PrintRegister(register(1, 0x08)),
        Step::PrintRegister(register(0, 0x100)),
        Step::PrintRegister(register(1, 0x100)),
    ];

    let ended = guest(&steps, &[])
        .disk(file(&[0; 4096]), true)
        .start(&kvm)
        .ended();

    // "virt", version 2; a block device of 8 sectors, then a socket device of context 3.
    let expected = [
        word(0x7472_6976),
        word(2),
        word(2),
        word(19),
        word(8),
        word(3),
    ]
    .concat();
    assert_eq!(ended.console, expected);
}

#[test]
fn where_no_device_is_reads_float_and_writes_go_nowhere() {
    let kvm = kvm_or_skip!("where_no_device_is_reads_float_and_writes_go_nowhere");
    let steps = [
        Step::Write(register(1, 0), 1),
        Step::PrintRegister(register(1, 0)),
        Step::Write(0xc000_0000, 1),
        Step::PrintRegister(0xc000_0000),
        // Over the end of the last device.
        Step::PrintRegister(register(0, 0xffe)),
    ];

    let ended = guest(&steps, &[]).start(&kvm).ended();

    assert_eq!(ended.reason, EndReason::Reset);
    assert_eq!(ended.console[..8], [0xff; 8]);
}

#[test]
fn every_port_takes_every_width() {
    let kvm = kvm_or_skip!("every_port_takes_every_width");
    // Around the reset port and the serial port, which the sweep would end or fill; and the rest in samples, since each access is an exit.
    let steps = [
        Step::SweepPorts(0, 0x60),
        Step::SweepPorts(0x70, 0x80),
        Step::SweepPorts(0x3e0, 0x3f0),
        Step::SweepPorts(0x400, 0x480),
        Step::SweepPorts(0xcf8, 0xd00),
        Step::SweepPorts(0xffe0, 0x1_0000),
        Step::Print(BUFFER, 4),
    ];

    let ended = guest(&steps, &[(BUFFER, b"done".to_vec())])
        .start(&kvm)
        .ended();

    assert_eq!(
        (ended.reason, ended.console),
        (EndReason::Reset, b"done".to_vec())
    );
}

#[test]
fn a_string_instruction_prints_every_byte() {
    let kvm = kvm_or_skip!("a_string_instruction_prints_every_byte");
    let text: Vec<u8> = (0..2000u32).map(|byte| byte.to_le_bytes()[0]).collect();
    let steps = [Step::PrintAtOnce(BUFFER, 2000)];

    let ended = guest(&steps, &[(BUFFER, text.clone())]).start(&kvm).ended();

    assert_eq!(ended.console, text);
}

/// One request of virtio 1.2 §5.2.6: its header, 512 bytes of data, its status.
fn block_request(kind: u32, sector: u64, data: &[u8]) -> (Queue, Vec<(u64, Vec<u8>)>) {
    let queue = Queue {
        index: 0,
        base: QUEUES,
    };
    let mut header = Vec::from(word(kind));
    header.extend_from_slice(&word(0));
    header.extend_from_slice(&sector.to_le_bytes());
    header.resize(0x1000, 0);
    header.extend_from_slice(data);
    header.resize(0x2000, 0xee);
    let device_writes = kind == 0;
    let descriptors = [
        Descriptor(BUFFER, 16, false, true),
        Descriptor(BUFFER + 0x1000, 512, device_writes, true),
        Descriptor(BUFFER + 0x1fff, 1, true, false),
    ];
    let rings = queue.data(&descriptors, &[0]);
    (queue, vec![(BUFFER, header), rings])
}

#[test]
fn a_sector_is_read_through_a_queue_and_the_interrupt_is_pending() {
    let kvm = kvm_or_skip!("a_sector_is_read_through_a_queue_and_the_interrupt_is_pending");
    let mut disk = vec![0; 2048];
    disk[512..524].copy_from_slice(b"sector one!\n");
    let (queue, data) = block_request(0, 1, &[]);
    let used_index = queue.used_index();
    let mut steps = start_device(0, &[queue]);
    steps.extend([
        notify(0, 0),
        Step::Await(used_index, 1),
        Step::Print(BUFFER + 0x1000, 12),
        Step::Print(BUFFER + 0x1fff, 1),
        Step::PrintRegister(register(0, 0x60)),
    ]);

    let ended = guest(&steps, &data)
        .disk(file(&disk), true)
        .start(&kvm)
        .ended();

    assert_eq!(ended.console, b"sector one!\n\0\x01\0\0\0");
}

#[test]
fn a_sector_is_written_to_a_writable_disk_alone() {
    for (read_only, status, on_disk) in [(false, 0, *b"written"), (true, 1, [0; 7])] {
        let kvm = kvm_or_skip!("a_sector_is_written_to_a_writable_disk_alone");
        let disk = file(&[0; 1024]);
        let kept = File::from(disk.try_clone().unwrap());
        let (queue, data) = block_request(1, 1, b"written");
        let used_index = queue.used_index();
        let mut steps = start_device(0, &[queue]);
        steps.extend([
            notify(0, 0),
            Step::Await(used_index, 1),
            Step::Print(BUFFER + 0x1fff, 1),
        ]);

        let ended = guest(&steps, &data)
            .disk(disk, read_only)
            .start(&kvm)
            .ended();

        let mut bytes = [0; 7];
        kept.read_exact_at(&mut bytes, 512).unwrap();
        assert_eq!((ended.console, bytes), (vec![status], on_disk));
    }
}

#[test]
fn a_disk_that_is_cut_short_while_it_runs_is_an_error_for_the_guest() {
    let kvm = kvm_or_skip!("a_disk_that_is_cut_short_while_it_runs_is_an_error_for_the_guest");
    let disk = file(&[7; 1024]);
    let kept = disk.try_clone().unwrap();
    let (queue, data) = block_request(0, 1, &[]);
    let used_index = queue.used_index();
    // The guest waits until the test has cut the disk: until a stream comes.
    let receive = Queue {
        index: 0,
        base: QUEUES + 0x1_0000,
    };
    let packet = BUFFER + 0x8000;
    let packets = receive.data(&[Descriptor(packet, 4096, true, false)], &[0]);
    let received = receive.used_index();
    let others = [1u32, 2].map(|index| Queue {
        index,
        base: QUEUES + 0x1_0000 + 0x4000 * u64::from(index),
    });
    let mut data = data;
    data.push(packets);
    let [transmit, events] = others;
    let mut steps = start_device(1, &[receive, transmit, events]);
    steps.push(Step::Await(received, 1));
    // The request is on offer already: it is served as soon as the device is in service.
    steps.extend(start_device(0, &[queue]));
    steps.extend([Step::Await(used_index, 1), Step::Print(BUFFER + 0x1fff, 1)]);
    let machine = guest(&steps, &data).disk(disk, true).start(&kvm);
    machine.running();

    rustix::fs::ftruncate(&kept, 512).unwrap();
    connect_until_taken(&machine.socket, 7);
    let ended = machine.ended();

    // VIRTIO_BLK_S_IOERR
    assert_eq!(ended.console, [1]);
}

/// Connects to a port of the guest, again and again until its device is in service and the stream stays open, or the guest has
/// ended.
fn connect_until_taken(socket: &ControlSocket, port: u32) {
    loop {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let message = ToMachine::Connect { port };
        if socket.send(&message, &[theirs.as_fd()]).is_err() {
            return;
        }
        drop(theirs);
        ours.set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        if ours.read(&mut [0]).is_err() {
            return;
        }
    }
}

/// A packet's header (virtio 1.2 §5.10.6): stream, from guest port 1000 to host port 1, with 64 KiB of credit.
fn packet(operation: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::from(3u64.to_le_bytes());
    packet.extend_from_slice(&2u64.to_le_bytes());
    packet.extend_from_slice(&word(1000));
    packet.extend_from_slice(&word(1));
    packet.extend_from_slice(&word(u32::try_from(payload.len()).unwrap()));
    packet.extend_from_slice(&1u16.to_le_bytes());
    packet.extend_from_slice(&operation.to_le_bytes());
    packet.extend_from_slice(&word(0));
    packet.extend_from_slice(&word(0x1_0000));
    packet.extend_from_slice(&word(0));
    packet.extend_from_slice(payload);
    packet
}

#[test]
fn a_guest_dials_the_host_and_both_speak() {
    let kvm = kvm_or_skip!("a_guest_dials_the_host_and_both_speak");
    let [receive, transmit, events] = [0u32, 1, 2].map(|index| Queue {
        index,
        base: QUEUES + 0x4000 * u64::from(index),
    });
    let received = receive.used_index();
    let (request, message) = (packet(1, b""), packet(5, b"ping"));
    let receive_data = receive.data(
        &[
            Descriptor(BUFFER, 4096, true, false),
            Descriptor(BUFFER + 0x1000, 4096, true, false),
        ],
        &[0, 1],
    );
    // Both are on offer from the start: the device takes them in order.
    let transmit_data = transmit.data(
        &[
            Descriptor(BUFFER + 0x2000, 44, false, false),
            Descriptor(BUFFER + 0x3000, 48, false, false),
        ],
        &[0, 1],
    );
    let data = [
        receive_data,
        transmit_data,
        (BUFFER + 0x2000, request),
        (BUFFER + 0x3000, message),
    ];
    let mut steps = start_device(0, &[receive, transmit, events]);
    steps.extend([
        notify(0, 1),
        Step::Await(received, 2),
        Step::Print(BUFFER + 30, 1),
        Step::Print(BUFFER + 0x1000 + 30, 1),
        Step::Print(BUFFER + 0x1000 + 44, 4),
    ]);
    let machine = guest(&steps, &data).start(&kvm);
    machine.running();

    let (message, mut descriptors) = machine.next();
    let mut stream = UnixStream::from(descriptors.remove(0));
    let mut heard = [0; 4];
    stream.read_exact(&mut heard).unwrap();
    stream.write_all(b"pong").unwrap();
    let ended = machine.ended();

    assert_eq!(
        message,
        FromMachine::GuestConnected {
            host_port: 1,
            guest_port: 1000
        }
    );
    assert_eq!(&heard, b"ping");
    // VIRTIO_VSOCK_OP_RESPONSE, then VIRTIO_VSOCK_OP_RW.
    assert_eq!(ended.console, b"\x02\x05pong");
}

#[test]
fn a_stream_to_a_guest_without_a_socket_driver_is_closed() {
    let kvm = kvm_or_skip!("a_stream_to_a_guest_without_a_socket_driver_is_closed");
    let never = [Step::Await(BUFFER, 1)];
    let machine = guest(&never, &[]).start(&kvm);
    machine.running();
    let (mut ours, theirs) = UnixStream::pair().unwrap();

    machine
        .socket
        .send(&ToMachine::Connect { port: 5 }, &[theirs.as_fd()])
        .unwrap();
    drop(theirs);

    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
    machine.close();
}
