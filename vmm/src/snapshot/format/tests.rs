//! A state file that is whole is read back; any other is refused with the reason.

use devices::serial::SerialState;
use devices::virtio::state::QueueState;
use devices::virtio::{QueuePosition, TransportState};
use devices::vsock::VsockState;
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use proptest::prelude::*;

use super::*;
use crate::snapshot::state::Controller;

/// A state in which every field has a value of its own, so that two that change places are seen.
fn sample(vcpu_count: u8) -> MachineState {
    let transport = |device_type| TransportState {
        device_type,
        offered_features: 0x0102_0304_0506_0708,
        config: vec![9; 64],
        device_status: 15,
        interrupt_status: 1,
        device_features_sel: 10,
        driver_features_sel: 11,
        driver_features: 12,
        wants_unknown_feature: true,
        queue_sel: 13,
        queues: vec![QueueState {
            size: 14,
            descriptor_table: 15,
            driver_area: 16,
            device_area: 17,
            is_ready: true,
        }],
        positions: vec![QueuePosition {
            served: 18,
            is_retired: true,
        }],
    };
    MachineState {
        shape: Shape {
            vcpu_count,
            memory_mib: 128,
            guest_cid: 3,
            cpuid: vec![kvm_cpuid_entry2 {
                function: 19,
                index: 20,
                flags: 21,
                eax: 22,
                ebx: 23,
                ecx: 24,
                edx: 25,
                ..kvm_cpuid_entry2::default()
            }],
        },
        devices: DevicesState {
            transports: vec![transport(2), transport(19)],
            vsock: VsockState { next_host_port: 26 },
            serial: SerialState {
                divisor_low: 27,
                divisor_high: 28,
                interrupt_enable: 29,
                interrupt_identification: 30,
                line_control: 31,
                line_status: 32,
                modem_control: 33,
                modem_status: 34,
                scratch: 35,
                in_buffer: vec![36, 37],
            },
        },
        chips: ChipsState {
            controllers: [38, 39, 40].map(|pad| {
                Controller(kvm_irqchip {
                    pad,
                    ..kvm_irqchip::default()
                })
            }),
            clock_ns: 41,
        },
        vcpus: (0..vcpu_count).map(u64::from).map(sample_vcpu).collect(),
    }
}

fn sample_vcpu(id: u64) -> VcpuState {
    let mut xsave = kvm_xsave::default();
    xsave.region[1] = 42;
    let mut lapic = kvm_lapic_state::default();
    lapic.regs[2] = 43;
    VcpuState {
        mp_state: kvm_mp_state { mp_state: 44 },
        regs: kvm_regs {
            rax: id,
            rip: 45,
            ..kvm_regs::default()
        },
        sregs: kvm_sregs {
            cr3: 46,
            ..kvm_sregs::default()
        },
        xsave,
        xcrs: kvm_xcrs {
            nr_xcrs: 47,
            ..kvm_xcrs::default()
        },
        debugregs: kvm_debugregs {
            dr6: 48,
            ..kvm_debugregs::default()
        },
        lapic,
        msrs: vec![kvm_msr_entry {
            index: 49,
            data: 50,
            ..kvm_msr_entry::default()
        }],
        tsc: 51,
        tsc_khz: 52,
        events: kvm_vcpu_events {
            flags: 53,
            ..kvm_vcpu_events::default()
        },
    }
}

/// The state file of [`sample`] as the present versions of the parts lay it out. `SANDVMM_WRITE_GOLDEN` in the environment
/// writes it anew.
const GOLDEN: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/src/snapshot/format/golden.state"
);

#[test]
fn the_layout_is_that_of_its_versions() {
    let now = encode(&sample(1)).unwrap();
    if std::env::var_os("SANDVMM_WRITE_GOLDEN").is_some() {
        std::fs::write(GOLDEN, &now).unwrap();
    }
    let golden = std::fs::read(GOLDEN).unwrap();

    assert!(
        now == golden,
        "The layout of a part has changed: count its version up in `Part::version`, and write the golden file anew"
    );
}

#[test]
fn a_state_is_read_as_it_was_written() {
    for vcpu_count in [1, 2, MAX_VCPUS] {
        let file = encode(&sample(vcpu_count)).unwrap();
        let again = encode(&parse(&file).unwrap()).unwrap();
        assert!(again == file);
    }
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let file = encode(&sample(2)).unwrap();
    for len in 0..file.len() {
        let error = parse(&file[..len]).unwrap_err();
        let expected = if len < HEADER_BYTES {
            FormatError::NotAState
        } else {
            FormatError::Length {
                bytes: len,
                said: u32::try_from(file.len()).unwrap(),
            }
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn a_file_with_any_bit_flipped_is_refused() {
    let file = encode(&sample(1)).unwrap();
    for bit in 0..file.len() * 8 {
        let mut file = file.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        let error = parse(&file).unwrap_err();
        let place = bit / 8;
        assert!(
            match error {
                FormatError::NotAState => place < 8,
                FormatError::Format { .. } => (8..10).contains(&place),
                FormatError::Malformed { part: Part::Shape } => (10..12).contains(&place),
                FormatError::Length { .. } => (12..16).contains(&place),
                FormatError::Damaged { .. } | FormatError::Missing { .. } => place >= 16,
                _ => false,
            },
            "bit {bit}: {error}"
        );
    }
}

#[test]
fn a_file_with_more_behind_it_is_refused() {
    let mut file = encode(&sample(1)).unwrap();
    file.push(0);
    assert!(matches!(
        parse(&file).unwrap_err(),
        FormatError::Length { .. }
    ));
    let longest = usize::try_from(MAX_STATE_BYTES).unwrap();
    assert_eq!(
        parse(&vec![0; longest + 1]).unwrap_err(),
        FormatError::TooLong
    );
}

/// A part: kind, version, payload.
type RawPart = (u16, u16, Vec<u8>);

/// A file with the parts of `sample(1)`, as `change` makes them.
fn rebuilt(change: impl FnOnce(&mut Vec<RawPart>)) -> Vec<u8> {
    let sample = sample(1);
    let mut parts = vec![
        (1, 1, postcard::to_stdvec(&sample.shape).unwrap()),
        (2, 1, postcard::to_stdvec(&sample.devices).unwrap()),
        (3, 1, postcard::to_stdvec(&sample.chips).unwrap()),
        (4, 1, postcard::to_stdvec(&sample.vcpus[0]).unwrap()),
    ];
    change(&mut parts);
    let mut file = encode(&sample).unwrap();
    file.truncate(HEADER_BYTES);
    for (kind, version, payload) in &parts {
        let mut header = Vec::from(kind.to_le_bytes());
        header.extend_from_slice(&version.to_le_bytes());
        header.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        file.extend_from_slice(&header);
        file.extend_from_slice(&checksum(&header, payload).to_le_bytes());
        file.extend_from_slice(payload);
    }
    let len = u32::try_from(file.len()).unwrap().to_le_bytes();
    file[12..16].copy_from_slice(&len);
    file
}

#[test]
fn whole_parts_of_another_version_or_in_another_order_are_refused() {
    assert!(rebuilt(|_| {}) == encode(&sample(1)).unwrap());
    let refused = |change: fn(&mut Vec<RawPart>)| parse(&rebuilt(change)).unwrap_err();

    assert_eq!(
        refused(|parts| parts[1].1 = 2),
        FormatError::PartVersion {
            part: Part::Devices,
            found: 2
        }
    );
    assert_eq!(
        refused(|parts| parts.swap(1, 2)),
        FormatError::Missing {
            part: Part::Devices
        }
    );
    assert_eq!(
        refused(|parts| parts.truncate(3)),
        FormatError::Missing {
            part: Part::Vcpu(0)
        }
    );
    assert!(matches!(
        refused(|parts| parts.push(parts[3].clone())),
        FormatError::Length { .. }
    ));
}

#[test]
fn whole_parts_that_make_no_sense_are_refused() {
    let malformed = |part| FormatError::Malformed { part };
    let refused = |index: usize, change: &dyn Fn(&mut MachineState)| {
        let mut state = sample(1);
        change(&mut state);
        let payload = match index {
            0 => postcard::to_stdvec(&state.shape),
            1 => postcard::to_stdvec(&state.devices),
            _ => postcard::to_stdvec(&state.vcpus[0]),
        };
        parse(&rebuilt(|parts| parts[index].2 = payload.unwrap())).unwrap_err()
    };
    for vcpu_count in [0, 2, MAX_VCPUS + 1, 255] {
        assert_eq!(
            refused(0, &|state| state.shape.vcpu_count = vcpu_count),
            malformed(Part::Shape)
        );
    }
    for memory_mib in [0, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1, u32::MAX] {
        assert_eq!(
            refused(0, &|state| state.shape.memory_mib = memory_mib),
            malformed(Part::Shape)
        );
    }
    for count in [0, MAX_DISKS + 2] {
        assert_eq!(
            refused(1, &|state| {
                let first = state.devices.transports[0].clone();
                state.devices.transports = vec![first; count];
            }),
            malformed(Part::Devices)
        );
    }
    assert_eq!(
        refused(3, &|state| state.vcpus[0].msrs =
            vec![kvm_msr_entry::default(); 257]),
        malformed(Part::Vcpu(0))
    );
    // Bytes behind a part's value, and lengths beyond it.
    assert_eq!(
        parse(&rebuilt(|parts| parts[3].2.push(0))).unwrap_err(),
        malformed(Part::Vcpu(0))
    );
    assert_eq!(
        parse(&rebuilt(|parts| parts[3].2[0] = 3)).unwrap_err(),
        malformed(Part::Vcpu(0)),
        "a structure of another length"
    );
    assert_eq!(
        parse(&rebuilt(|parts| parts[1].2 = vec![0xff; 9])).unwrap_err(),
        malformed(Part::Devices),
        "a list that is longer than any memory"
    );
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
        parse(&bytes).unwrap_err();
    }

    #[test]
    fn no_payload_makes_the_parser_panic(index in 0..4_usize, payload: Vec<u8>) {
        let _ = parse(&rebuilt(|parts| parts[index].2 = payload));
    }

    #[test]
    fn no_change_of_a_payload_makes_the_parser_panic(
        index in 0..4_usize,
        place: proptest::sample::Index,
        byte: u8,
    ) {
        let file = rebuilt(|parts| {
            let place = place.index(parts[index].2.len());
            parts[index].2[place] = byte;
        });
        if let Ok(state) = parse(&file) {
            // What is taken can be written again.
            encode(&state).unwrap();
        }
    }
}
