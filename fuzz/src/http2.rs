//! Target `http2`: heads of requests within TLS that was opened, as the crate that reads frames gives them.
//!
//! Checked: what goes on is for the host that was allowed and asks for nothing in which a secret could not be seen, whatever the head; what
//! has gone on would go on again as it is.

use egress::interception::http2::Requests;
use egress::name::HostName;
use egress::policy::Target;
use http::header::{ACCEPT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Uri, Version};

use crate::Seeds;

/// The host that the connection is for, and its port.
const HOST: &str = "a.example";
const PORT: u16 = 443;

/// Fields that would have an answer in which a secret is not seen, and the one that HTTP/2 has elsewhere.
const NEVER: [&str; 6] = [
    "range",
    "if-range",
    "grpc-accept-encoding",
    "connect-accept-encoding",
    "http2-settings",
    "host",
];

/// A head from lines: the method, the target, and the fields; `None` for one that no reader of frames would give.
fn head(data: &[u8]) -> Option<Request<()>> {
    let mut lines = data.split(|byte| *byte == b'\n');
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(lines.next()?).ok()?;
    *request.uri_mut() = Uri::try_from(lines.next()?).ok()?;
    *request.version_mut() = Version::HTTP_2;
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(&line[colon + 1..]).ok()?;
        request.headers_mut().try_append(name, value).ok()?;
    }
    Some(request)
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let target = Target::Name(HostName::parse(HOST).expect("it is a name"));
    let requests = Requests::without_secrets(target, PORT);
    let Some(head) = head(data) else {
        return;
    };
    let (asked, ()) = head.into_parts();
    let Ok(passed) = requests.take(&asked) else {
        return;
    };
    assert!(![Method::CONNECT, Method::TRACE].contains(passed.method()));
    let uri = passed.uri();
    assert_eq!(uri, &asked.uri);
    let authority = uri.authority().expect("it has an authority");
    assert!(!authority.as_str().contains('@'), "{authority}");
    let name = HostName::parse(authority.host()).expect("it is a name");
    assert_eq!((name.as_str(), uri.scheme_str()), (HOST, Some("https")));
    assert!([None, Some(PORT)].contains(&uri.port_u16()), "{authority}");
    check_fields(passed.headers());

    let (again, ()) = passed.into_parts();
    let twice = requests.take(&again).expect("what has passed is good");
    assert_eq!(twice.headers(), &again.headers);
}

fn check_fields(fields: &HeaderMap) {
    for name in NEVER {
        assert!(!fields.contains_key(name), "{name}");
    }
    let encodings: Vec<_> = fields.get_all(ACCEPT_ENCODING).iter().collect();
    assert_eq!(encodings, ["identity"]);
    let lengths = fields.get_all("content-length").iter();
    assert!(lengths.count() <= 1);
}

/// The corpus.
#[must_use]
pub fn seeds() -> Seeds {
    vec![
        ("plain", b"GET\nhttps://a.example/x?y\nx-a:b".to_vec()),
        (
            "port_and_host",
            b"POST\nhttps://A.example:443/\nhost:a.example\ncontent-length:5\nte:trailers".to_vec(),
        ),
        ("all_of_it", b"OPTIONS\nhttps://a.example".to_vec()),
        (
            "another_host",
            b"GET\nhttps://b.example/\nhost:a.example".to_vec(),
        ),
        (
            "two_hosts",
            b"GET\nhttps://a.example/\nhost:a.example\nhost:b.example".to_vec(),
        ),
        ("a_user", b"GET\nhttps://a.example@b.example/".to_vec()),
        (
            "encodings",
            b"GET\nhttps://a.example/\naccept-encoding:gzip\nrange:bytes=1-\naccept-encoding:br"
                .to_vec(),
        ),
        ("a_tunnel", b"CONNECT\na.example:443".to_vec()),
    ]
}
