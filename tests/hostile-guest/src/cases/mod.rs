//! The cases, by name.

mod disk;
mod machine;
mod rings;
mod sockets;
mod transport;

/// A name and what the guest does.
pub(crate) type Case = (&'static str, fn());

/// Makes a case of each function, with the function's name.
macro_rules! cases {
    ($($module:ident: $($name:ident)+;)+) => {
        &[$($((stringify!($name), $module::$name)),+),+]
    };
}

/// All of them.
pub(crate) const ALL: &[Case] = cases! {
    transport: odd_accesses undefined_registers config_past_end queue_select_out_of_range bad_queue_sizes bad_ring_addresses
        rings_of_two_queues_overlap queue_ready_early_and_twice queue_registers_after_driver_ok features_not_offered no_version_1
        features_after_features_ok status_out_of_order early_and_late_kicks reset_with_requests_in_flight reset_with_streams_open
        kicks_without_pause kicks_for_ever exits_for_ever;
    rings: chains_that_loop chain_longer_than_queue next_past_the_end head_past_the_end available_index_ahead
        available_index_backwards buffers_outside_memory packets_outside_memory lengths_beyond_reason indirect_descriptors
        same_head_twice descriptor_changed_meanwhile event_indices_poisoned_and_wrapped;
    disk: sectors_past_the_end lengths_that_are_no_sectors writes_to_a_read_only_disk ids_without_room statuses_without_room
        headers_short_split_and_writable unknown_requests ranges_that_overflow zeroes_without_end
        a_disk_is_used_for_all_that_it_can;
    sockets: packets_shorter_than_they_say foreign_addresses unknown_operations data_beyond_credit credit_that_shrinks_and_lies
        data_at_the_wrong_time hundred_thousand_connects connections_to_the_cap receive_queue_never_filled stuck_connections_go_with_a_reset reader_that_never_reads
        connects_then_ends data_for_a_late_reader;
    machine: triple_fault jump_to_nowhere halts_for_ever spins_for_ever pauses_for_ever every_port string_io reset_port gaps_in_mmio
        unemulated_instruction every_msr every_cpuid_leaf serial_flood serial_reader_that_stopped;
};
