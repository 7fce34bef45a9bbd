//! Secrets that a guest uses and never has: real programs in real guests, a real authority and real TLS servers.

use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::network::{HTTP2, Network, START_HTTP2, text};

/// The secret's value: nowhere but with the server that it is for.
const VALUE: &str = "sk-5f1d9c0b7e2a48d6-not-for-the-guest";

/// Puts the host's curl, with its libraries, into a folder.
const CURL: &str =
    "mkdir curl && cp $(command -v curl) $(ldd $(command -v curl) | grep -o '/[^ ]*') curl/";

/// The requests that reached a server's `/show`: path, then all of it.
fn seen(network: &Network) -> Vec<(String, Value)> {
    let text = fs::read_to_string(network.path("seen")).unwrap();
    let objects = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    objects
        .map(|object| (object["path"].as_str().unwrap().to_owned(), object))
        .collect()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_secret_reaches_its_host_alone_and_is_nowhere_in_the_guest() {
    let network = Network::new(&[
        ("secrets.py", include_str!("egress/secrets.py")),
        ("scan.py", include_str!("egress/scan.py")),
        HTTP2,
    ]);
    fs::write(network.path("token"), format!("{VALUE}\n")).unwrap();

    let output = network.run(&format!(
        "{CURL}
         {START_HTTP2}
         sandvmm run --cold --json --timeout 600s --egress-log log --events events \
             --secret TOKEN@api.example,bad.example,api.example:8443=file:token \\
             --egress-ca ca.pem --allow-host allowed.example --allow-host api.example:80 --upload curl:curl secrets.py > out.json &
         run=$!
         while kill -0 $run && ! grep -q wait received; do sleep 0.2; done
         placeholder=$(grep -o 'sandvmm-secret-[0-9a-f]*' seen | head -n 1)
         python3 -I -S scan.py $run {VALUE} $placeholder
         touch scanned
         wait $run"
    ));

    let object: Value =
        serde_json::from_slice(&fs::read(network.path("out.json")).unwrap()).unwrap();
    let stars = "*".repeat(VALUE.len());
    let masked = format!("('Bearer {stars}', 'you are Bearer {stars}')");
    let stdout = object["stdout"].as_str().unwrap();
    let line = |name: &str| {
        let found = stdout
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name} ")));
        found.unwrap_or_else(|| panic!("{name}: {object}"))
    };
    assert!(
        stdout.starts_with("True 47\n") && stdout.ends_with("True\n"),
        "{object}"
    );
    for name in ["get", "path", "body"] {
        assert_eq!(line(name), masked, "{name}");
    }
    // What curl makes of a name and a password, and what of it comes back: stars, and what fills up the end.
    let credentials = STANDARD.encode(format!("me:{VALUE}"));
    let bare = credentials.trim_end_matches('=');
    let masked = format!(
        "Basic {}",
        credentials.replacen(bare, &"*".repeat(bare.len()), 1)
    );
    assert_eq!(line("basic"), format!("('{masked}', 'you are {masked}')"));
    assert_eq!(line("curl-user").trim(), format!("you are {masked}"));
    assert_eq!(line("http2-user"), format!("you are {masked} HTTP/2"));
    assert_eq!(line("http2"), format!("you are Bearer {stars} HTTP/2"));
    for name in ["chunks", "kept", "curl"] {
        assert_eq!(
            line(name).trim(),
            format!("you are Bearer {stars}"),
            "{name}"
        );
    }
    assert_eq!((line("other"), line("clear")), ("True", "True"));
    for name in ["bad", "host", "sni", "smuggled", "folded", "trace"] {
        let end = line(name);
        assert!(
            end.ends_with("Error") || end == "RemoteDisconnected" || end == "b''",
            "{name}: {end}"
        );
    }

    // What the servers saw.
    let seen = seen(&network);
    let placeholder = seen
        .iter()
        .find(|(path, _)| path == "/show/clear")
        .and_then(|(_, object)| object["fields"]["authorization"].as_str())
        .and_then(|field| field.strip_prefix("Bearer "))
        .unwrap();
    assert!(placeholder.starts_with("sandvmm-secret-"));
    let of = |path: &str| {
        let found = seen.iter().find(|(known, _)| known == path);
        &found.unwrap_or_else(|| panic!("{path}: {seen:?}")).1
    };
    let at_path = format!("/show/{placeholder}?k={placeholder}");
    for path in [
        "/show/get",
        &at_path,
        "/show/body",
        "/show/chunks",
        "/show/kept",
        "/show/curl",
        "/show/http2",
    ] {
        assert_eq!(
            of(path)["fields"]["authorization"],
            format!("Bearer {VALUE}"),
            "{path}"
        );
    }
    for path in ["/show/basic", "/show/curl-user", "/show/http2-user"] {
        assert_eq!(
            of(path)["fields"]["authorization"],
            format!("Basic {credentials}"),
            "{path}"
        );
    }
    for path in ["/show/http2", "/show/http2-user"] {
        assert_eq!(of(path)["version"], "HTTP/2", "{path}");
    }
    for path in ["/show/body", "/show/chunks", "/show/http2"] {
        assert_eq!(of(path)["body"], format!("[{placeholder}]"));
    }
    assert_eq!(
        of("/show/other")["fields"]["authorization"],
        format!("Bearer {placeholder}")
    );
    assert_eq!(seen.len(), 12, "{seen:?}");

    // What is on record.
    let records = network.records();
    for (host, verdict, reason) in [
        (
            "bad.example",
            "denied",
            "the server's certificate is refused",
        ),
        (
            "api.example",
            "denied",
            "another Host: the request is for 'allowed.example'",
        ),
        ("api.example", "denied", "another SNI"),
        (
            "api.example",
            "denied",
            "Content-Length beside Transfer-Encoding",
        ),
        ("api.example", "denied", "a field goes on in the next line"),
        ("api.example", "denied", "TRACE"),
    ] {
        let is_this = |record: &&Value| {
            record["host"] == host
                && record["verdict"] == verdict
                && record["reason"]
                    .as_str()
                    .is_some_and(|text| text.contains(reason))
        };
        assert!(
            records.iter().any(|record| is_this(&record)),
            "{reason}: {records:#?}"
        );
    }

    // Where it is not. The search finds what is there: the placeholder.
    let counts: Vec<u64> = text(&output.stdout)
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    let [searched_mib, values, placeholders] = counts[..] else {
        panic!("{counts:?}");
    };
    assert!(searched_mib >= 256 && placeholders > 0, "{counts:?}");
    assert_eq!(values, 0, "the guest's memory has the secret");
    for name in ["log", "events", "out.json"] {
        let content = fs::read_to_string(network.path(name)).unwrap();
        assert!(!content.is_empty() && !content.contains(VALUE), "{name}");
    }
    assert!(!text(&output.stderr).contains(VALUE));
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_fork_of_a_template_uses_a_secret_that_the_template_never_saw() {
    let program = "import os, urllib.request
request = urllib.request.Request('https://api.example/show', headers={'X-Key': os.environ['TOKEN']})
print(urllib.request.urlopen(request, timeout=60).status)
";
    let network = Network::new(&[("use.py", program)]);

    let output = network.run(&format!(
        "sandvmm template build secret-test --warm 'import ssl, urllib.request' --force >&2
         export OTHER={VALUE}
         echo {VALUE} > token
         for source in env:OTHER file:token 'command:cat token'; do
             sandvmm run --template secret-test --timeout 100s --secret TOKEN@api.example=\"$source\" --egress-ca ca.pem use.py
         done
         export TOKEN={VALUE}
         sandvmm run --template secret-test --timeout 100s --secret TOKEN@api.example --egress-ca ca.pem use.py
         sandvmm run --template secret-test --timeout 100s -c 'import os; print(os.environ.get(\"TOKEN\"))'
         folder=$(dirname $(find ${{SANDVMM_HOME:-${{XDG_DATA_HOME:-$HOME/.local/share}}/sandvmm}} -path '*secret-test*' -name 'memory*' | head -n 1))
         ls $folder >&2; grep -rl {VALUE} $folder; test -n \"$folder\" && echo searched
         sandvmm template rm secret-test"
    ));

    assert_eq!(text(&output.stdout), "200\n200\n200\n200\nNone\nsearched\n");
    let tokens: Vec<_> = seen(&network)
        .into_iter()
        .map(|(_, object)| object["fields"]["x-key"].clone())
        .collect();
    assert_eq!(tokens, [VALUE; 4]);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_secret_that_there_is_not_or_that_would_be_given_away_is_refused() {
    let network = Network::new(&[]);

    let output = network.run(&format!(
        "sandvmm run --secret TOKEN@api.example -c 0
         TOKEN={VALUE} sandvmm run --secret TOKEN@api.example -e TOKEN -c 0
         sandvmm run --secret TOKEN@api.example={VALUE} -c 0; echo $?"
    ));

    let stderr = text(&output.stderr);
    for sentence in [
        "TOKEN, which is not set",
        "is set by -e",
        "never the value itself",
    ] {
        assert!(stderr.contains(sentence), "{sentence}: {stderr}");
    }
    assert!(!stderr.contains(VALUE));
    assert_eq!(text(&output.stdout), "2\n");
}
