//! Random accesses, and accesses from many processors at once.

use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;

/// One access of a guest.
#[derive(Clone, Debug)]
enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Register(u32, u32),
    EventLoop,
}

fn access() -> impl Strategy<Value = Access> {
    let register = prop_oneof![
        Just(reg::VIRTIO_MMIO_STATUS),
        Just(reg::VIRTIO_MMIO_QUEUE_NUM),
        Just(reg::VIRTIO_MMIO_QUEUE_READY),
        Just(reg::VIRTIO_MMIO_QUEUE_DESC_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_USED_LOW),
        Just(reg::VIRTIO_MMIO_QUEUE_NOTIFY),
        Just(reg::VIRTIO_MMIO_DRIVER_FEATURES),
        Just(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL),
        (0_u32..64).prop_map(|word| word * 4),
    ];
    let value = prop_oneof![
        Just(ACKNOWLEDGED),
        Just(DRIVER_FOUND),
        Just(FEATURES_AGREED),
        Just(RUNNING),
        0_u32..2,
        (0_u32..0x110).prop_map(|page| page << 12),
        (0_u32..10).prop_map(|shift| 1 << shift),
        any::<u32>(),
    ];
    prop_oneof![
        1 => (any::<u64>(), 0_usize..9).prop_map(|(offset, len)| Access::Read(offset, len)),
        1 => (0_u64..0x1100, proptest::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(offset, data)| Access::Write(offset, data)),
        10 => (register, value).prop_map(|(register, value)| Access::Register(register, value)),
        1 => Just(Access::EventLoop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// No sequence of accesses panics; the device is active exactly while DRIVER_OK is set; and if it is, then
    /// with a queue that is legal and features that were offered.
    #[test]
    fn prop_random_accesses_keep_the_invariants(
        accesses in proptest::collection::vec(access(), 0..120),
        begin_negotiated in any::<bool>(),
    ) {
        let mut s = setup();
        if begin_negotiated {
            s.negotiate(s.offered_features());
            s.set_drivers_queue();
        }
        for access in accesses {
            match access {
                Access::Read(offset, len) => s.transport.read(offset, &mut vec![0; len]),
                Access::Write(offset, data) => s.transport.write(offset, &data),
                Access::Register(register, value) => s.write(register, value),
                Access::EventLoop => s.run_loop(),
            }
            let status = s.status();
            prop_assert!([0, 1, 3, 11, 15].contains(&(status & !0xc0)), "{status:#x}");
            prop_assert_eq!(s.is_active(), status & 4 != 0);
            let registers = lock(&s.transport.registers);
            if status & 8 != 0 {
                prop_assert_eq!(registers.driver_features & !s.transport.offered_features, 0);
                prop_assert_ne!(registers.driver_features & VERSION_1, 0);
            }
            if status & 4 != 0 {
                let layout = registers.queues[0].ready.unwrap();
                prop_assert!(layout.size().is_power_of_two() && layout.size() <= 256);
                for (from, to) in layout.ranges() {
                    prop_assert!(from < to && to <= MEMORY_LEN as u64);
                }
            }
        }
    }
}

/// Four processors that kick, acknowledge, read, reset and start without pause, beside the event loop: nothing
/// deadlocks, and the device works afterwards.
#[test]
fn test_four_processors_at_once_leave_a_working_device() {
    let mut s = setup();
    let done = AtomicBool::new(false);
    let Setup {
        transport,
        event_loop,
        ..
    } = &mut s;
    let transport = &*transport;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                event_loop.run_with_timeout(1).unwrap();
            }
        });
        let processors: Vec<_> = (0..4_u32)
            .map(|seed| {
                scope.spawn(move || {
                    for round in 0..5_000_u32 {
                        let register = match (seed + round) % 8 {
                            0 => reg::VIRTIO_MMIO_STATUS,
                            1 => reg::VIRTIO_MMIO_INTERRUPT_ACK,
                            _ => reg::VIRTIO_MMIO_QUEUE_NOTIFY,
                        };
                        let value = [0, ACKNOWLEDGED, DRIVER_FOUND, FEATURES_AGREED, RUNNING]
                            [usize::try_from(round % 5).unwrap()];
                        transport.write(u64::from(register), &value.to_le_bytes());
                        transport.read(CONFIG_OFFSET, &mut [0; 8]);
                    }
                })
            })
            .collect();
        processors.into_iter().for_each(|p| p.join().unwrap());
        done.store(true, Ordering::SeqCst);
    });

    s.set_status(0);
    s.start();
    assert_eq!(s.read_sector(), Some(0));
}
