//! HTTP/2's floods: each ends, and is told, or is waited for; and what is held stays small.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::shapes::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, RESET, SETTINGS, WINDOW_UPDATE,
    block, frame,
};
use super::*;

/// Sends all of these, reading what comes meanwhile, until the connection ends; whether it has.
async fn sent_until_end(case: &Case2, frames: impl Iterator<Item = Vec<u8>>) -> bool {
    let (mut reader, mut writer) = tokio::io::split(case.raw().await);
    let mut chunk = vec![0; 1 << 16];
    let reads = async { while let Ok(1..) = reader.read(&mut chunk).await {} };
    let writes = async {
        let mut held = Vec::new();
        for frame in frames {
            held.extend_from_slice(&frame);
            if held.len() > 60_000 {
                if writer.write_all(&held).await.is_err() {
                    return true;
                }
                held.clear();
            }
        }
        writer.write_all(&held).await.is_err() || writer.flush().await.is_err()
    };
    let both = async { tokio::join!(writes, reads) };
    let limit = Duration::from_secs(10);
    tokio::time::timeout(limit, both).await.is_ok()
}

const FRAMES: &str = "a flood: more heads, resets or frames than a connection has";

#[test]
fn floods_end_the_connection_and_are_told() {
    let odd = |number: u32| 2 * number + 1;
    type Frames = Box<dyn Fn(&[u8]) -> Box<dyn Iterator<Item = Vec<u8>>>>;
    let cases: Vec<(&str, &str, Frames)> = vec![
        (
            "heads without end",
            FRAMES,
            Box::new(|_| {
                let first = frame(HEADERS, END_STREAM, 1, &block(&[("x", "y")]));
                let more = std::iter::repeat_with(|| frame(CONTINUATION, 0, 1, &[]));
                Box::new(std::iter::once(first).chain(more.take(100_000)))
            }),
        ),
        (
            "a head of a size of its own",
            FRAMES,
            Box::new(|good| {
                // Three bytes for each of which 4,000 stand in the table (a bomb).
                let value = "x".repeat(3900);
                let mut bomb = [good, &[0x40], &block(&[("x-bomb", &value)])[1..]].concat();
                bomb.extend(std::iter::repeat_n(0xbe, 10_000));
                let bomb = frame(HEADERS, END_HEADERS | END_STREAM, 1, &bomb);
                Box::new(std::iter::once(bomb))
            }),
        ),
        (
            "requests that are taken back at once",
            FRAMES,
            Box::new(move |good| {
                let good = good.to_vec();
                Box::new((0..10_000).map(move |number| {
                    let head = frame(HEADERS, END_HEADERS, odd(number), &good);
                    [head, frame(RESET, 0, odd(number), &[0, 0, 0, 8])].concat()
                }))
            }),
        ),
        (
            "requests against the protocol",
            FRAMES,
            Box::new(move |good| {
                let bad = [good, &block(&[("connection", "close")])].concat();
                Box::new(
                    (0..10_000).map(move |number| {
                        frame(HEADERS, END_HEADERS | END_STREAM, odd(number), &bad)
                    }),
                )
            }),
        ),
        (
            "more streams than may be",
            FRAMES,
            Box::new(move |good| {
                let good = good.to_vec();
                Box::new(
                    (0..10_000).map(move |number| frame(HEADERS, END_HEADERS, odd(number), &good)),
                )
            }),
        ),
        (
            "pings",
            "a flood: frames that belong to no request",
            Box::new(|_| {
                Box::new(std::iter::repeat_with(|| frame(PING, 0, 0, &[0; 8])).take(1_000_000))
            }),
        ),
        (
            "settings",
            "a flood: frames that belong to no request",
            Box::new(|_| {
                let settings = [0, 4, 0, 0, 255, 255].repeat(100);
                Box::new(
                    std::iter::repeat_with(move || frame(SETTINGS, 0, 0, &settings)).take(100_000),
                )
            }),
        ),
        (
            "windows",
            "HTTP/2 that breaks its protocol: flow-control protocol violated",
            Box::new(|_| {
                let most = 0x7fff_ffff_u32.to_be_bytes();
                Box::new(std::iter::repeat_with(move || frame(WINDOW_UPDATE, 0, 0, &most)).take(10))
            }),
        ),
        (
            "empty data",
            FRAMES,
            Box::new(|good| {
                let head = frame(HEADERS, END_HEADERS, 1, good);
                let empty = std::iter::repeat_with(|| frame(DATA, 0, 1, &[]));
                Box::new(std::iter::once(head).chain(empty.take(100_000)))
            }),
        ),
        (
            "more data than the window has",
            "a flood: frames that belong to no request",
            Box::new(|good| {
                let head = frame(HEADERS, END_HEADERS, 1, good);
                let data = std::iter::repeat_with(|| frame(DATA, 0, 1, &[7; 16_000]));
                Box::new(std::iter::once(head).chain(data.take(1000)))
            }),
        ),
    ];
    for (name, reason, frames) in cases {
        let case = Case2::new(&[HTTP2]);
        let (authority, placeholder) = (
            format!("a.example:{}", case.case.port),
            case.case.placeholder(),
        );
        let good = block(&case.fields(&authority, "/head/never", &placeholder));
        let began = Instant::now();
        assert!(run(sent_until_end(&case, frames(&good))), "{name}");
        let record = case.case.record();
        let told = record.reason.unwrap();
        eprintln!(
            "{name}: {told} ({} ms, {} bytes)",
            began.elapsed().as_millis(),
            record.bytes_out
        );
        assert_eq!(record.verdict, Verdict::Denied, "{name}: {told}");
        assert!(told.contains(reason), "{name}: {told}");
        assert!(case.seen().len() <= 210, "{name}: {}", case.seen().len());
    }
}

#[test]
fn requests_that_are_taken_back_when_they_have_gone_on_are_counted() {
    let case = Case2::new(&[HTTP2]);
    let (authority, placeholder) = (
        format!("a.example:{}", case.case.port),
        case.case.placeholder(),
    );
    let good = block(&case.fields(&authority, "/head/never", &placeholder));
    run(async {
        let mut stream = case.raw().await;
        for number in 0..1000 {
            let stream_id = 2 * number + 1;
            let head = frame(HEADERS, END_HEADERS, stream_id, &good);
            let before = case.seen().len();
            if stream.write_all(&head).await.is_err() {
                break;
            }
            for _ in 0..100 {
                if case.seen().len() > before {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let reset = frame(RESET, 0, stream_id, &[0, 0, 0, 8]);
            if case.seen().len() == before || stream.write_all(&reset).await.is_err() {
                break;
            }
        }
    });
    let reason = case.case.record().reason.unwrap();
    assert_eq!(reason, "a flood: requests that it takes back");
    // Some while it takes so long.
    let seen = case.seen().len();
    assert!((101..=200).contains(&seen), "{seen}");
}

#[test]
fn a_program_that_reads_nothing_is_read_no_more() {
    let case = Case2::new(&[HTTP2]);
    let sent = run(async {
        let mut stream = case.raw().await;
        let pings = frame(PING, 0, 0, &[0; 8]).repeat(1000);
        let mut sent = 0;
        let limit = Duration::from_millis(500);
        while let Ok(Ok(count)) = tokio::time::timeout(limit, stream.write(&pings)).await {
            sent += count;
            assert!(sent < 4 << 20, "all of it is taken");
        }
        sent
    });
    eprintln!("{sent} bytes of pings were taken");
    assert_eq!(case.case.record().verdict, Verdict::Allowed);
}

#[test]
fn a_head_that_is_too_long_is_refused_and_the_next_is_not() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let long = case
            .request("GET", "/head")
            .header("x-long", "x".repeat(60_000))
            .body(())
            .unwrap();
        let (answer, _) = client.send_request(long, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 431);
        let request = case.request("GET", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
    });
    assert_eq!(case.seen().len(), 1);
}

#[test]
fn fields_are_bounded_in_number_and_with_their_secrets() {
    for (count, value, is_placeholder) in [(200, "y", false), (60, "", true)] {
        let long = "s3cr3t-value".repeat(1000);
        let secret = Secret::new("TOKEN", &["a.example"], long.into_bytes()).unwrap();
        let secret = Arc::new(secret);
        let value = if is_placeholder {
            secret.placeholder()
        } else {
            value
        };
        let target = Target::Name(HostName::parse("a.example").unwrap());
        let secrets = vec![Arc::clone(&secret)];
        let requests =
            crate::interception::http2::Requests::new(&target, 443, secrets, &Arc::default());
        let mut request = http::Request::builder().uri("https://a.example/");
        for number in 0..count {
            request = request.header(format!("x-{number}"), value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(
            requests.take(&head).err(),
            Some(crate::http::HttpError::TooLong)
        );
    }
}

#[test]
fn streams_of_one_sandbox_are_bounded_over_all_connections() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut clients = Vec::new();
        let mut answers = Vec::new();
        for number in 0..600 {
            if number % 100 == 0 {
                clients.push(case.client().await);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let request = case.request("GET", "/head/never").body(()).unwrap();
            let client = clients.last_mut().unwrap();
            let ready = client.clone().ready().await.unwrap();
            drop(ready);
            let (answer, send) = client.send_request(request, true).unwrap();
            answers.push((answer, send));
        }
        let mut refused = 0;
        for (answer, _) in &mut answers {
            let soon = Duration::from_millis(if refused == 0 { 20 } else { 200 });
            if let Ok(Err(error)) = tokio::time::timeout(soon, answer).await {
                assert_eq!(error.reason(), Some(h2::Reason::REFUSED_STREAM), "{error}");
                refused += 1;
            }
        }
        assert_eq!((refused, case.seen().len()), (88, 512));
        // A place that is given back is another's.
        drop(clients);
        drop(answers);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut client = case.client().await;
        let request = case.request("GET", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
    });
}

#[test]
fn a_server_that_says_early_answers_without_end_is_left() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("GET", "/head/endless").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let error = answer.await.unwrap_err();
        assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM));
    });
}
