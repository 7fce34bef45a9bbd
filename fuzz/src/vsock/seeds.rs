//! Inputs to begin with.

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    // A packet: step; operation; guest's and host's port; what is odd; length of data; whether the count is kept; room; flags of a
    // shutdown; how it is split.
    let request = [0, 0, 0, 0, 0, 0, 0, 3];
    let data = [1, 1, 0, 0, 0, 2, 0, 0, 3];
    let much_data = [1, 1, 0, 0, 0, 4, 0, 0, 0];
    let update = [2, 5, 0, 0, 0, 0, 0, 3];
    let ask = [2, 6, 0, 0, 0, 0, 0, 3];
    let shutdown = [3, 4, 0, 0, 0, 0, 0, 3, 3];
    let reset = [4, 7, 0, 0, 0, 0, 0, 3];
    let response = [0, 2, 0, 5, 0, 0, 0, 3];
    // Buffers: step; queue; length; how many; how each is split.
    let buffers = [5, 1, 0, 4, 2, 0, 2, 2];
    let small_buffers = [5, 1, 1, 3, 2, 2, 2];
    let events = [5, 0, 6, 1, 2];
    let (settle, host_reads, host_writes) = ([12], [7, 0, 2, 0, 64], [8, 0, 2, 0, 16]);
    let (host_shuts, host_closes, host_connects) = ([9, 0, 0, 0, 0], [10, 0], [11, 0]);
    let (restart, transport_reset) = ([15, 0], [15, 1]);
    let begin = |flags, steps: &[&[u8]]| {
        let mut bytes = vec![flags];
        steps.iter().for_each(|step| bytes.extend_from_slice(step));
        bytes
    };
    let open: [&[u8]; 4] = [&buffers, &request, &settle, &data];
    let with = |steps: &[&[u8]]| {
        let all: Vec<&[u8]> = open.iter().chain(steps).copied().collect();
        begin(0, &all)
    };
    vec![
        (
            "both_directions",
            with(&[
                &settle,
                &host_reads,
                &host_writes,
                &settle,
                &update,
                &ask,
                &settle,
            ]),
        ),
        (
            "guest_closes",
            with(&[&shutdown, &settle, &buffers, &settle]),
        ),
        ("guest_resets", with(&[&reset, &settle, &request, &settle])),
        (
            "host_closes",
            with(&[&settle, &host_closes, &settle, &data, &settle]),
        ),
        (
            "host_shuts",
            with(&[&host_shuts, &settle, &shutdown, &settle]),
        ),
        (
            "host_connects",
            begin(
                0,
                &[
                    &buffers,
                    &host_connects,
                    &settle,
                    &response,
                    &host_writes,
                    &settle,
                    &data,
                    &settle,
                ],
            ),
        ),
        (
            "reader_that_stopped",
            with(&[
                &much_data, &much_data, &much_data, &settle, &much_data, &settle,
            ]),
        ),
        (
            "small_buffers",
            begin(
                2,
                &[
                    &small_buffers,
                    &request,
                    &settle,
                    &host_writes,
                    &settle,
                    &small_buffers,
                    &settle,
                ],
            ),
        ),
        (
            "restart",
            with(&[&host_writes, &restart, &request, &settle]),
        ),
        (
            "transport_reset",
            with(&[
                &events,
                &settle,
                &transport_reset,
                &settle,
                &request,
                &settle,
            ]),
        ),
        (
            "no_event_index",
            begin(1, &[&buffers, &request, &settle, &data, &settle]),
        ),
    ]
}
