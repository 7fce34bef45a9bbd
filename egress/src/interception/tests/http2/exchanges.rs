//! Requests and answers, as programs and servers have them.

use super::*;

fn stars(count: usize) -> String {
    "*".repeat(count)
}

#[test]
fn a_server_of_http2_gets_the_secret_in_fields_alone_and_the_program_gets_none_back() {
    let case = Case2::new(&[HTTP2, HTTP1]);
    let placeholder = case.case.placeholder();
    let credentials = STANDARD.encode(format!("me:{placeholder}"));

    let (head, body, trailers) = run(async {
        let mut client = case.client().await;
        let request = case
            .request("POST", &format!("/all/{placeholder}?k={placeholder}"))
            .header("authorization", format!("Basic {credentials}"))
            .header("accept-encoding", "gzip")
            .header("grpc-accept-encoding", "gzip")
            .header("range", "bytes=1-")
            .header("te", "trailers")
            .header("host", format!("A.example:{}", case.case.port))
            .body(())
            .unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        send_all(&mut send, Bytes::from(format!("[{placeholder}]"))).await;
        let mut trailers = HeaderMap::new();
        trailers.insert("x-trailer", placeholder.parse().unwrap());
        send.send_trailers(trailers).unwrap();
        let (head, body) = answer.await.unwrap().into_parts();
        let (body, trailers) = read_all(body).await.unwrap();
        (head, String::from_utf8(body).unwrap(), trailers.unwrap())
    });

    let seen = &case.seen()[0];
    assert_eq!(seen.method, "POST");
    assert_eq!(
        seen.uri,
        format!(
            "https://a.example:{}/all/{placeholder}?k={placeholder}",
            case.case.port
        )
    );
    assert_eq!(seen.field("x-token"), Some(VALUE));
    let basic = STANDARD.encode(format!("me:{VALUE}"));
    assert_eq!(
        seen.field("authorization"),
        Some(&*format!("Basic {basic}"))
    );
    assert_eq!(seen.field("accept-encoding"), Some("identity"));
    assert_eq!(seen.field("te"), Some("trailers"));
    for name in ["host", "range", "grpc-accept-encoding"] {
        assert_eq!(seen.field(name), None, "{name}");
    }
    assert_eq!(seen.body, format!("[{placeholder}]").as_bytes());
    assert_eq!(seen.trailers.as_ref().unwrap()["x-trailer"], *placeholder);

    let masked = stars(VALUE.len());
    assert_eq!(head.headers["x-back"], *masked);
    assert_eq!(body, format!("you are {masked}, with [{placeholder}]"));
    assert_eq!(
        (&trailers["grpc-status"], &trailers["x-back"]),
        (&"0".parse().unwrap(), &masked.parse().unwrap())
    );
    let record = case.case.record();
    assert_eq!((record.verdict, &record.reason), (Verdict::Allowed, &None));
    assert!(record.bytes_in > 0 && record.bytes_out > 0);
    assert!(!record.json().contains(VALUE));
}

#[test]
fn what_the_server_chooses_of_what_the_program_offers_is_spoken_with_both() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for (has, offer, spoken) in [
        (&[HTTP2, HTTP1][..], &[HTTP2, HTTP1][..], Some(HTTP2)),
        (&[HTTP2, HTTP1], &[HTTP1], Some(HTTP1)),
        (&[HTTP2, HTTP1], &[], None),
        (&[HTTP1], &[HTTP2, HTTP1], Some(HTTP1)),
        (&[], &[HTTP2, HTTP1], Some(HTTP1)),
    ] {
        let case = Case2::new(has);
        run(async {
            let mut stream = case.dial(offer).await.unwrap();
            let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
            assert_eq!(protocol.as_deref(), spoken, "{has:?} {offer:?}");
            if spoken == Some(HTTP2) {
                return;
            }
            let request = case.case.request("/", &case.case.placeholder());
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = [0; 40];
            let count = stream.read(&mut answer).await.unwrap();
            assert!(answer[..count].starts_with(b"HTTP/1.1 200 OK"));
            let seen = String::from_utf8(case.seen()[0].body.clone()).unwrap();
            assert!(seen.contains(&format!("X-Token: {VALUE}\r\n")), "{seen}");
        });
    }
}

#[test]
fn a_program_of_http2_alone_is_told_that_the_server_has_none() {
    for (has, reason) in [
        (
            &[HTTP1][..],
            "speaks no version of HTTP that the program offers",
        ),
        (&[], "speak no version of HTTP in common"),
    ] {
        let case = Case2::new(has);
        run(async { case.dial(&[HTTP2]).await.unwrap_err() });
        let record = case.case.record();
        assert_eq!(record.verdict, Verdict::Failed);
        let told = record.reason.unwrap();
        assert!(told.contains(reason), "{told}");
    }
}

#[test]
fn messages_go_both_ways_at_once_as_grpc_has_them() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("POST", "/stream").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        let mut body = answer.await.unwrap().into_body();
        for number in 0..50 {
            let message = format!("message {number}");
            send.send_data(Bytes::from(message.clone()), false).unwrap();
            let back = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(back.len()).unwrap();
            assert_eq!(back, message);
        }
        send.send_data(Bytes::new(), true).unwrap();
        assert!(body.data().await.is_none());
        let trailers = body.trailers().await.unwrap().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    });
    assert_eq!(case.case.record().reason, None);
}

#[test]
fn a_value_in_pieces_is_masked_and_its_beginning_is_held_no_longer_than_a_pause() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("GET", "/head/pieces").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        let masked = format!("[{}]", stars(VALUE.len()));
        assert_eq!(String::from_utf8(body).unwrap(), masked);

        let request = case.request("GET", "/head/pause").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        let began = Instant::now();
        assert_eq!(body.data().await.unwrap().unwrap(), VALUE[..6]);
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn early_answers_come_with_secrets_masked_and_resets_with_their_reason() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("GET", "/head/early").body(()).unwrap();
        let (mut answer, _) = client.send_request(request, true).unwrap();
        let early = std::future::poll_fn(|context| answer.poll_informational(context)).await;
        let early = early.unwrap().unwrap();
        assert_eq!(early.status(), 103);
        assert_eq!(early.headers()["x-back"], *stars(VALUE.len()));
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        assert_eq!(body, b"late");

        let request = case.request("GET", "/head/reset").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let error = answer.await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::INADEQUATE_SECURITY));

        // The connection goes on.
        let request = case.request("HEAD", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
    });
}

#[test]
fn bytes_in_bulk_arrive_both_ways_on_many_streams() {
    const SIZE: usize = 1_500_000;
    let case = Case2::new(&[HTTP2]);
    run(async {
        let client = case.client().await;
        let exchange = |letter: u8| {
            let (case, mut client) = (&case, client.clone());
            async move {
                let request = case.request("POST", "/all").body(()).unwrap();
                let (answer, mut send) = client.send_request(request, false).unwrap();
                send_all(&mut send, Bytes::from(vec![letter; SIZE]))
                    .await
                    .unwrap();
                send.send_data(Bytes::new(), true).unwrap();
                let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
                let front = format!("you are {}, with ", stars(VALUE.len()));
                assert_eq!(&body[..front.len()], front.as_bytes());
                assert!(body[front.len()..] == vec![letter; SIZE]);
            }
        };
        tokio::join!(exchange(b'a'), exchange(b'b'), exchange(b'c'));
    });
    let record = case.case.record();
    let size = 3 * SIZE as u64;
    assert!(
        record.bytes_out > size && record.bytes_out < size * 11 / 10,
        "{record:?}"
    );
    assert!(
        record.bytes_in > size && record.bytes_in < size * 11 / 10,
        "{record:?}"
    );
}

#[test]
fn a_server_waits_for_a_program_that_does_not_read_and_other_streams_do_not() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut builder = h2::client::Builder::new();
        let mut client = case.client_of(builder.initial_window_size(1000)).await;
        let request = case.request("GET", "/head/bulk").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        let stuck = answer.await.unwrap().into_body();

        let mut sent = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = case.seen()[0].body.len() * 20_000;
            if now == sent {
                break;
            }
            sent = now;
        }
        // What the windows have, and what the server itself has in hand.
        assert!((200_000..500_000).contains(&sent), "{sent}");
        let request = case.request("GET", "/head").body(()).unwrap();
        let (answer, _) = client.send_request(request, true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);

        let (all, _) = read_all(stuck).await.unwrap();
        let expected: Vec<u8> = (0..200).flat_map(|number| vec![number; 20_000]).collect();
        assert!(all == expected);
    });
}

#[test]
fn what_was_asked_for_is_answered_when_the_server_ends_and_the_rest_may_be_tried_again() {
    let case = Case2::new(&[HTTP2]);
    run(async {
        let mut client = case.client().await;
        let request = case.request("POST", "/go").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        while client.clone().ready().await.is_ok() {
            let request = case.request("GET", "/head").body(()).unwrap();
            let Ok((answer, _)) = client.send_request(request, true) else {
                break;
            };
            if let Err(error) = answer.await {
                assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM), "{error}");
                break;
            }
        }
        send_all(&mut send, Bytes::from_static(b"whole"))
            .await
            .unwrap();
        send.send_data(Bytes::new(), true).unwrap();
        let (body, trailers) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        assert!(body.ends_with(b", with whole"));
        assert!(trailers.is_some());
    });
    assert_eq!(case.case.record().verdict, Verdict::Allowed);
}

#[test]
fn a_secret_that_was_sent_over_http1_is_masked_over_http2() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let case = Case2::new(&[HTTP2, HTTP1]);
    let user = STANDARD.encode(format!("me:{}", case.case.placeholder()));
    run(async {
        let mut old = case.dial(&[HTTP1]).await.unwrap();
        let request = case.case.request("/", "none").replace(
            "\r\n\r\n",
            &format!("\r\nAuthorization: Basic {user}\r\n\r\n"),
        );
        old.write_all(request.as_bytes()).await.unwrap();
        assert!(old.read(&mut [0; 100]).await.unwrap() > 0);

        let form = STANDARD.encode(format!("me:{VALUE}"));
        let mut client = case.client().await;
        let request = case.request("POST", "/all").body(()).unwrap();
        let (answer, mut send) = client.send_request(request, false).unwrap();
        send_all(&mut send, Bytes::from(form.clone()))
            .await
            .unwrap();
        send.send_data(Bytes::new(), true).unwrap();
        let (body, _) = read_all(answer.await.unwrap().into_body()).await.unwrap();
        let body = String::from_utf8(body).unwrap();
        assert!(
            !body.contains(form.trim_end_matches('=')) && body.contains("with ***"),
            "{body}"
        );
    });
}
