//! Snapshots: a device that goes on where another was, and states that no device could have had.

use proptest::prelude::*;

use super::*;
use crate::virtio::registers::LayoutError;
use crate::virtio::state::{Preserve, QueuePosition, QueueState, StateError, TransportState};

/// A new machine with the same memory, in front of a disk of `sectors`.
fn successor(memory: &GuestMemoryMmap, sectors: u64) -> Setup {
    let line = CountingLine::default();
    let disk = MemoryDisk::new(sectors);
    let block = Block::new(Box::new(disk.clone()), [0; 20]).unwrap();
    let device = Arc::new(Mutex::new(block));
    let mut event_loop = Loop::new().unwrap();
    event_loop.add_subscriber(device.clone());
    // The fields of a driver that has forgotten nothing: the test replaces it.
    let scratch = super::memory(MEMORY_LEN);
    Setup {
        transport: MmioTransport::new(device, memory.clone(), Box::new(line.clone())),
        driver: DriverQueue::new(&scratch, RING, 16),
        memory: memory.clone(),
        line,
        disk,
        event_loop,
    }
}

/// The state of a device that has served three requests.
fn running() -> (Setup, TransportState) {
    let mut before = setup();
    before.start();
    for _ in 0..3 {
        assert_eq!(before.read_sector(), Some(0));
    }
    let state = before.transport.save();
    (before, state)
}

/// Goes on with the driver of `before` in front of a new device.
fn go_on(before: Setup, state: &TransportState) -> Setup {
    let mut after = successor(&before.memory, 16);
    after.transport.restore(state).unwrap();
    after.driver = before.driver;
    after
}

#[test]
fn a_device_goes_on_where_it_was() {
    let (before, state) = running();
    assert_eq!(
        state.positions,
        [QueuePosition {
            served: 3,
            is_retired: false
        }]
    );

    let mut after = go_on(before, &state);

    assert_eq!(after.transport.save(), state);
    for _ in 0..40 {
        assert_eq!(after.read_sector(), Some(0));
    }
    assert_eq!(after.line.count(), 40);
}

#[test]
fn a_request_whose_kick_was_lost_is_served_and_a_pending_interrupt_is_raised_again() {
    let (mut before, _) = running();
    before.add_request(4, &[]);
    let state = before.transport.save();
    assert_eq!(state.interrupt_status, 1, "the last request's");

    let mut after = go_on(before, &state);
    after.run_loop();
    assert_eq!(after.driver.used_index(), 3, "nobody has kicked");
    after.transport.repeat_signals();
    assert_eq!(after.line.count(), 1);
    after.run_loop();

    assert_eq!(after.driver.used_index(), 4);
}

#[test]
fn every_step_of_the_handshake_survives() {
    let before = setup();
    let steps: [&dyn Fn(&Setup); 6] = [
        &|_| {},
        &|s| s.set_status(ACKNOWLEDGED),
        &|s| s.set_status(DRIVER_FOUND),
        &|s| {
            s.set_features(s.offered_features());
            s.set_status(FEATURES_AGREED);
        },
        &|s| assert_eq!(s.set_drivers_queue(), 1),
        &|s| s.set_status(RUNNING),
    ];
    for (index, step) in steps.into_iter().enumerate() {
        step(&before);
        let state = before.transport.save();

        let after = successor(&before.memory, 16);
        after.transport.restore(&state).unwrap();
        assert_eq!(after.transport.save(), state);
        assert_eq!(after.is_active(), index == 5);
        for rest in steps.iter().skip(index + 1) {
            rest(&after);
        }
        assert_eq!(after.status(), RUNNING, "from step {index} on");
    }
}

#[test]
fn a_retired_queue_stays_retired() {
    let (mut before, _) = running();
    before.driver.set_available_index(1000);
    before.write(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    before.run_loop();
    let state = before.transport.save();
    assert!(state.positions[0].is_retired);

    let mut after = go_on(before, &state);
    after.driver.set_available_index(3);
    assert_eq!(after.read_sector(), None);
    assert_eq!(after.status(), RUNNING | NEEDS_RESET);
}

#[test]
fn a_disk_of_another_size_is_refused() {
    let (before, state) = running();
    let result = successor(&before.memory, 17).transport.restore(&state);
    assert!(matches!(result, Err(StateError::Config)), "{result:?}");
}

#[test]
fn a_position_that_does_not_fit_the_ring_retires_the_queue_and_no_more() {
    let (before, mut state) = running();
    state.positions[0].served = 2000;

    let mut after = go_on(before, &state);
    after.transport.repeat_signals();
    after.run_loop();

    assert_eq!(after.status(), RUNNING | NEEDS_RESET);
}

#[test]
fn states_that_no_driver_leads_to_are_refused() {
    type Change = fn(&mut TransportState);
    let registers: [Change; 11] = [
        |state| state.device_status = 7,
        |state| state.device_status = 4,
        |state| state.device_status = 1 << 31 | 15,
        |state| state.interrupt_status = 4,
        |state| state.queues.clear(),
        |state| state.queues.push(state.queues[0]),
        |state| state.positions.clear(),
        |state| state.positions.push(QueuePosition::default()),
        |state| state.device_status = FEATURES_AGREED,
        |state| state.positions[0].is_retired = true,
        |state| state.driver_features = 0,
    ];
    let (before, good) = running();
    let refuse = |change: Change| {
        let mut state = good.clone();
        change(&mut state);
        successor(&before.memory, 16)
            .transport
            .restore(&state)
            .unwrap_err()
    };
    for (index, change) in registers.into_iter().enumerate() {
        let error = refuse(change);
        assert!(
            matches!(error, StateError::Registers { .. }),
            "{index}: {error}"
        );
    }
    assert!(matches!(
        refuse(|state| state.device_type = 19),
        StateError::DeviceType {
            saved: 19,
            device_type: 2
        }
    ));
    assert!(matches!(
        refuse(|state| state.offered_features ^= 1 << 40),
        StateError::Features { .. }
    ));
    assert!(matches!(
        refuse(|state| state.queues[0].device_area = 1 << 40),
        StateError::Layout {
            index: 0,
            source: LayoutError::NotMemory { .. }
        }
    ));
    assert!(matches!(
        refuse(|state| state.queues[0].is_ready = false),
        StateError::Activation(ActivationError::QueueNotReady { index: 0 })
    ));
}

proptest! {
    #[test]
    fn no_state_makes_a_device_panic(
        device_status: u8,
        interrupt_status in 0_u32..4,
        size in prop_oneof![Just(16), any::<u32>()],
        areas in proptest::array::uniform3(prop_oneof![0..0x10_0000_u64, any::<u64>()]),
        is_ready: bool,
        served: u16,
        is_retired: bool,
        is_active: bool,
    ) {
        let (before, mut state) = running();
        state.device_status = device_status.into();
        state.interrupt_status = interrupt_status;
        state.queues = vec![QueueState {
            size,
            descriptor_table: areas[0],
            driver_area: areas[1],
            device_area: areas[2],
            is_ready,
        }];
        state.positions = vec![QueuePosition { served, is_retired }];
        state.positions.truncate(usize::from(is_active));

        let mut after = successor(&before.memory, 16);
        if after.transport.restore(&state).is_ok() {
            after.transport.repeat_signals();
            after.run_loop();
        }
    }
}
