//! The cases: the kind that each shows, and the only acceptable outcome.

/// What must come of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The guest gets an error, or what it did is dropped; the device goes on, and the guest has seen that.
    Refused,
    /// The device asks for a reset, never parses the queue again until it comes, and works after it: the guest has seen that.
    NeedsReset,
    /// The machine ends by itself within a second, with this reason.
    Ends(End),
    /// The guest goes on for ever, within the bounds of every case; the machine ends within a second when its supervisor wants it.
    GoesOn,
}

/// A reason with which a machine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The guest asked for it.
    Reset,
    /// A triple fault.
    TripleFault,
    /// The processor can't go on.
    VcpuFailed,
}

impl Outcome {
    /// As the README says it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::NeedsReset => "needs reset",
            Self::Ends(End::Reset) => "ends: reset",
            Self::Ends(End::TripleFault) => "ends: triple fault",
            Self::Ends(End::VcpuFailed) => "ends: vCPU failed",
            Self::GoesOn => "goes on",
        }
    }
}

/// One case.
#[derive(Debug)]
pub(crate) struct Case {
    /// The test's name, and what the guest is told.
    pub(crate) name: &'static str,
    /// The part that it is about.
    pub(crate) part: &'static str,
    pub(crate) outcome: Outcome,
    /// What the guest does.
    pub(crate) does: &'static str,
}

const fn case(
    part: &'static str,
    outcome: Outcome,
    name: &'static str,
    does: &'static str,
) -> Case {
    Case {
        name,
        part,
        outcome,
        does,
    }
}

/// Descriptors of a machine with two disks are 24; a few more do not make a leak.
const DESCRIPTORS_MAX: usize = 30;

/// Connections of a machine at one time, by the socket device's limits.
const CONNECTIONS_MAX: usize = 1023;

/// The most descriptors that the process of a case may have at its end, beside those of streams that the suite holds too.
pub(crate) fn descriptors_max(name: &str) -> usize {
    // Connections whose end the guest does not want to hear of hold theirs, up to the cap.
    if name == "receive_queue_never_filled" {
        DESCRIPTORS_MAX + CONNECTIONS_MAX
    } else {
        DESCRIPTORS_MAX
    }
}

use Outcome::{Ends, GoesOn, NeedsReset, Refused};

/// All cases, in the guest's own order.
pub(crate) const CASES: &[Case] = &[
    case(
        "transport",
        Refused,
        "odd_accesses",
        "1-, 2- and 8-byte and unaligned access to every register",
    ),
    case(
        "transport",
        Refused,
        "undefined_registers",
        "undefined offsets; writes to read-only registers, reads of write-only ones",
    ),
    case(
        "transport",
        Refused,
        "config_past_end",
        "configuration space across and past its end, and writes to it",
    ),
    case(
        "transport",
        Refused,
        "queue_select_out_of_range",
        "QueueSel out of range, then every queue register",
    ),
    case(
        "transport",
        Refused,
        "bad_queue_sizes",
        "QueueNum 0, no power of two, above the maximum, 2³²−1",
    ),
    case(
        "transport",
        Refused,
        "bad_ring_addresses",
        "rings unaligned, overlapping, outside memory, over devices, near 2⁶⁴",
    ),
    case(
        "transport",
        NeedsReset,
        "rings_of_two_queues_overlap",
        "two queues of a device on the same rings",
    ),
    case(
        "transport",
        Refused,
        "queue_ready_early_and_twice",
        "QueueReady without addresses, and twice",
    ),
    case(
        "transport",
        Refused,
        "queue_registers_after_driver_ok",
        "size, addresses and QueueReady of a queue in service (CVE-2026-5747)",
    ),
    case(
        "transport",
        Refused,
        "features_not_offered",
        "each feature that is not offered, and those above 63",
    ),
    case(
        "transport",
        Refused,
        "no_version_1",
        "no VIRTIO_F_VERSION_1",
    ),
    case(
        "transport",
        Refused,
        "features_after_features_ok",
        "features changed after FEATURES_OK and DRIVER_OK",
    ),
    case(
        "transport",
        Refused,
        "status_out_of_order",
        "from each step, every value of Status: bits skipped, cleared, all set",
    ),
    case(
        "transport",
        Refused,
        "early_and_late_kicks",
        "kicks before each step and after a reset",
    ),
    case(
        "transport",
        Refused,
        "reset_with_requests_in_flight",
        "resets while long reads are served: memory is still afterwards",
    ),
    case(
        "transport",
        Refused,
        "reset_with_streams_open",
        "resets while streams carry data",
    ),
    case(
        "transport",
        Refused,
        "kicks_without_pause",
        "two processors kick every queue while requests are served",
    ),
    case(
        "transport",
        GoesOn,
        "kicks_for_ever",
        "two processors kick every queue and do nothing else",
    ),
    case(
        "transport",
        GoesOn,
        "exits_for_ever",
        "two processors read and write registers and do nothing else, an exit each time",
    ),
    case(
        "rings",
        NeedsReset,
        "chains_that_loop",
        "a descriptor that follows itself, two that follow one another, a loop behind a beginning",
    ),
    case(
        "rings",
        NeedsReset,
        "chain_longer_than_queue",
        "a chain of all descriptors works, one more is a loop",
    ),
    case(
        "rings",
        NeedsReset,
        "next_past_the_end",
        "`next` at or past the queue's size",
    ),
    case(
        "rings",
        NeedsReset,
        "head_past_the_end",
        "an available head at or past the queue's size",
    ),
    case(
        "rings",
        NeedsReset,
        "available_index_ahead",
        "an available index more than the queue's size ahead",
    ),
    case(
        "rings",
        NeedsReset,
        "available_index_backwards",
        "an available index that goes back",
    ),
    case(
        "rings",
        Refused,
        "buffers_outside_memory",
        "disk requests whose parts wrap, or cross the end of memory, or are devices",
    ),
    case(
        "rings",
        Refused,
        "packets_outside_memory",
        "the same for packets, and for the buffers that packets go to",
    ),
    case(
        "rings",
        Refused,
        "lengths_beyond_reason",
        "lengths 0 and 2³²−1, sums above 4 GiB of the same memory",
    ),
    case(
        "rings",
        NeedsReset,
        "indirect_descriptors",
        "indirect tables, which are not offered: nested, with NEXT, of any length, anywhere",
    ),
    case(
        "rings",
        Refused,
        "same_head_twice",
        "one head many times in flight, and chains that share descriptors (CVE-2026-45782)",
    ),
    case(
        "rings",
        Refused,
        "descriptor_changed_meanwhile",
        "a second processor changes a descriptor while it is used",
    ),
    case(
        "rings",
        Refused,
        "event_indices_poisoned_and_wrapped",
        "any used_event and avail_event, and indices that wrap: no completion is lost",
    ),
    case(
        "block",
        Refused,
        "sectors_past_the_end",
        "sectors at and past the capacity; products and sums that overflow",
    ),
    case(
        "block",
        Refused,
        "lengths_that_are_no_sectors",
        "data of 0, 1, 511, 513 bytes, and none",
    ),
    case(
        "block",
        Refused,
        "writes_to_a_read_only_disk",
        "write, discard and write-zeroes on a read-only disk; a flush succeeds",
    ),
    case(
        "block",
        Refused,
        "ids_without_room",
        "GET_ID into less than 20 bytes",
    ),
    case(
        "block",
        Refused,
        "statuses_without_room",
        "a status of 0 bytes, not writable, or not there: nothing is done, the head comes back",
    ),
    case(
        "block",
        Refused,
        "headers_short_split_and_writable",
        "headers short, writable, behind the data; split to bytes they work",
    ),
    case(
        "block",
        Refused,
        "unknown_requests",
        "SCSI and other unknown types",
    ),
    case(
        "block",
        Refused,
        "ranges_that_overflow",
        "discard and write-zeroes with ranges that overflow, are cut, or too many",
    ),
    case(
        "block",
        Refused,
        "zeroes_without_end",
        "a queue full of the largest requests that write zeroes: another disk is served between",
    ),
    case(
        "block",
        Refused,
        "a_disk_is_used_for_all_that_it_can",
        "nothing wrong: writes, reads, a flush, space given back, zeroes",
    ),
    case(
        "vsock",
        Refused,
        "packets_shorter_than_they_say",
        "`len` beyond the descriptors, headers under 44 bytes (CVE-2019-18960)",
    ),
    case(
        "vsock",
        Refused,
        "foreign_addresses",
        "wrong and reserved source identifiers; destinations other than the host",
    ),
    case(
        "vsock",
        Refused,
        "unknown_operations",
        "unknown types, operations and flags, in a connection and out of one",
    ),
    case(
        "vsock",
        Refused,
        "data_beyond_credit",
        "data beyond the credit, in one packet and in many, to a reader that does not read",
    ),
    case(
        "vsock",
        Refused,
        "credit_that_shrinks_and_lies",
        "a buffer that shrinks, is 0 or the maximum; counts ahead and behind (CVE-2026-23069)",
    ),
    case(
        "vsock",
        Refused,
        "data_at_the_wrong_time",
        "every operation before a connect, after a shutdown and after a reset; connects on ports in use",
    ),
    case(
        "vsock",
        Refused,
        "hundred_thousand_connects",
        "up to 10⁵ connects to ports where nobody listens, and ports 0 and 2³²−1",
    ),
    case(
        "vsock",
        Refused,
        "connections_to_the_cap",
        "more connections than there may be, all with data that nobody reads",
    ),
    case(
        "vsock",
        Refused,
        "receive_queue_never_filled",
        "no receive buffer, while the host connects and writes and packets are owed (CVE-2020-16843)",
    ),
    case(
        "vsock",
        Refused,
        "stuck_connections_go_with_a_reset",
        "the same, then a reset of the device: all is given back",
    ),
    case(
        "vsock",
        Refused,
        "reader_that_never_reads",
        "a stream from the host that the guest accepts and never reads",
    ),
    case(
        "vsock",
        Ends(End::TripleFault),
        "connects_then_ends",
        "connects, then ends with a fault: the supervisor hears all of it, also late",
    ),
    case(
        "vsock",
        Refused,
        "data_for_a_late_reader",
        "nothing wrong: as much data as it may send at once, for a reader that takes its time",
    ),
    case(
        "machine",
        Ends(End::TripleFault),
        "triple_fault",
        "a fault without a handler",
    ),
    case(
        "machine",
        Ends(End::VcpuFailed),
        "jump_to_nowhere",
        "a jump to mapped addresses behind which there is no memory",
    ),
    case("machine", GoesOn, "halts_for_ever", "`cli; hlt`"),
    case("machine", GoesOn, "spins_for_ever", "a tight loop"),
    case("machine", GoesOn, "pauses_for_ever", "a loop of PAUSE"),
    case(
        "machine",
        Refused,
        "every_port",
        "every port in 1, 2 and 4 bytes, in and out",
    ),
    case(
        "machine",
        Refused,
        "string_io",
        "long string instructions on ports of all kinds",
    ),
    case(
        "machine",
        Ends(End::Reset),
        "reset_port",
        "everything at the reset port but the command, then the command",
    ),
    case(
        "machine",
        Refused,
        "gaps_in_mmio",
        "reads and writes where nothing is, and over the edges of memory and devices",
    ),
    case(
        "machine",
        Ends(End::VcpuFailed),
        "unemulated_instruction",
        "an instruction on a register that cannot be emulated",
    ),
    case(
        "machine",
        Refused,
        "every_msr",
        "three values to each of 7,000 model-specific registers; those that tell of the host are 0 or not there",
    ),
    case(
        "machine",
        Refused,
        "every_cpuid_leaf",
        "every CPUID leaf: nothing of the host's processor of the moment, no virtualization, no counters",
    ),
    case(
        "console",
        Refused,
        "serial_flood",
        "up to 64 MiB of NULs and letters without a newline",
    ),
    case(
        "console",
        Refused,
        "serial_reader_that_stopped",
        "the same while nobody reads: the processor is not held up",
    ),
];
