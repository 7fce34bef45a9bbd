//! How connections and answers end.

use super::*;

#[test]
fn the_answer_of_a_server_that_takes_no_more_comes_whole() {
    // Less than is held for the guest, and more than its socket takes.
    const SIZE: usize = 60_000;
    let case = Case::serving(
        &["a.example"],
        true,
        Arc::new(|stream, _| {
            let _ = stream.read(&mut [0; 100]);
            let text = "x".repeat(SIZE);
            let answer = format!("HTTP/1.1 413 No\r\nContent-Length: {SIZE}\r\n\r\n{text}");
            stream.write_all(answer.as_bytes()).unwrap();
            stream.flush().unwrap();
            // The answer arrives, and then a reset, as not all was read.
            thread::sleep(Duration::from_millis(300));
        }),
    );
    let (program, ours) = UnixStream::pair().unwrap();
    socket2::SockRef::from(&ours)
        .set_send_buffer_size(4096)
        .unwrap();
    let mut stream = case.dial_through("a.example", program, ours);
    let post = case.request("/", "none").replace("GET", "POST");
    let post = post.replace("\r\n\r\n", "\r\nContent-Length: 100000000\r\n\r\n");
    stream.write_all(post.as_bytes()).unwrap();
    stream
        .sock
        .set_write_timeout(Some(Duration::from_millis(600)))
        .unwrap();
    // Writes alone, and then reads alone: as much as is taken, and all that has come.
    let text = vec![b'x'; 16 << 10];
    while stream.conn.writer().write_all(&text).is_ok() {
        while stream.conn.wants_write() && stream.conn.write_tls(&mut stream.sock).is_ok() {}
    }
    let mut all = Vec::new();
    while let Ok(1..) = stream.conn.read_tls(&mut stream.sock) {
        stream.conn.process_new_packets().unwrap();
        let _ = stream.conn.reader().read_to_end(&mut all);
    }
    assert!(all.ends_with(&[b'x'; SIZE]), "{}", all.len());
}

#[test]
fn an_answer_that_ends_in_the_beginning_of_a_secret_comes_whole_and_at_once() {
    const END: &str = "s3cr3t-value-of-the-hos";
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{END}",
        END.len()
    );
    let length = answer.len();
    let case = Case::new(&["a.example"], true, Box::leak(answer.into_boxed_str()));
    let mut stream = case.dial("a.example");
    stream
        .sock
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let request = case.request("/", &case.placeholder());
    stream.write_all(request.as_bytes()).unwrap();

    let mut back = vec![0; length];
    stream.read_exact(&mut back).unwrap();
    assert!(back.ends_with(END.as_bytes()));
}

#[test]
fn all_requests_of_a_program_that_waits_for_no_answer_arrive() {
    const COUNT: usize = 1000;
    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let case = Case::serving(
        &["a.example"],
        true,
        Arc::new(|stream, _| {
            let (mut all, mut answered) = (Vec::new(), 0);
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut chunk) {
                all.extend_from_slice(&chunk[..count]);
                let asked = memchr::memmem::find_iter(&all, b"\r\n\r\n").count();
                stream
                    .write_all(OK.repeat(asked - answered).as_bytes())
                    .unwrap();
                stream.flush().unwrap();
                answered = asked;
            }
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }),
    );
    let mut stream = case.dial("a.example");
    let request = case.request("/", &case.placeholder());
    stream.write_all(request.repeat(COUNT).as_bytes()).unwrap();
    stream.conn.send_close_notify();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();

    assert!(back == OK.repeat(COUNT).as_bytes(), "{}", back.len());
}

#[test]
fn a_program_that_has_said_all_and_is_gone_is_waited_for_no_longer() {
    let case = Case::serving(
        &["a.example"],
        true,
        Arc::new(|stream, sender| {
            read_head(stream, sender);
            // It neither answers nor closes.
            thread::sleep(Duration::from_secs(60));
        }),
    );
    let mut stream = case.dial("a.example");
    stream
        .write_all(case.request("/", "none").as_bytes())
        .unwrap();
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    while case.received().is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    drop(stream);

    assert_eq!(case.record().verdict, Verdict::Allowed);
}
