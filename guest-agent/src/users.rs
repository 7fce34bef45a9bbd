//! Who a command runs as: accounts from the image's `/etc/passwd` and `/etc/group`, read without a name
//! service, since a static program has none.

use std::fs::File;
use std::io::Read;

use crate::limits::{MAX_ACCOUNT_FILE_BYTES, MAX_GROUPS};

/// The account that an image is expected to bring for commands.
const DEFAULT_NAME: &str = "sandbox";
/// The first ordinary user of a Linux distribution, used when there is no account of that name.
const DEFAULT_UID: u32 = 1000;
/// `nobody`, used when the image has no ordinary user.
const NOBODY: u32 = 65_534;
/// The home that `nobody` gets.
const NOBODY_HOME: &str = "/home/sandbox";
/// The value that system calls take for "no change"; nobody's number.
const NO_ID: u32 = u32::MAX;

/// Everything about a user that a command needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Login name; the number when there is no account.
    pub name: String,
    /// Home folder.
    pub home: String,
    /// Shell.
    pub shell: String,
    /// Whether the home is to be made if it is missing: the image's own homes are its business.
    pub make_home: bool,
}

/// Why there is no such user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// No account of this name.
    #[error("There is no user {0:?} in the image; name one of its /etc/passwd, or a number")]
    NoUser(String),
    /// No group of this name.
    #[error("There is no group {0:?} in the image; name one of its /etc/group, or a number")]
    NoGroup(String),
}

/// The texts of `/etc/passwd` and `/etc/group`.
#[derive(Debug, Default)]
pub struct Accounts {
    passwd: String,
    group: String,
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

impl Accounts {
    /// Reads the image's files; one that is missing counts as empty.
    #[must_use]
    pub fn read() -> Self {
        Self {
            passwd: read_bounded("/etc/passwd"),
            group: read_bounded("/etc/group"),
        }
    }

    /// The user that `spec` (`USER[:GROUP]`, each by name or number) means, or the default one.
    ///
    /// # Errors
    /// [`UserError`] when a name is unknown. A number needs no account.
    pub fn resolve(&self, spec: Option<&str>) -> Result<User, UserError> {
        let Some(spec) = spec else {
            return Ok(self.default_user());
        };
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let mut user = match self.account(|account| account.name == user) {
            Some(account) => self.user(&account),
            None => match number(user) {
                Some(uid) => match self.account(|account| account.uid == uid) {
                    Some(account) => self.user(&account),
                    None => without_account(uid),
                },
                None => return Err(UserError::NoUser(user.to_owned())),
            },
        };
        if let Some(group) = group {
            user.gid = self
                .group_number(group)
                .ok_or_else(|| UserError::NoGroup(group.to_owned()))?;
            // Who names the group names all of them.
            user.groups = vec![user.gid];
        }
        Ok(user)
    }

    fn default_user(&self) -> User {
        let account = self
            .account(|account| account.name == DEFAULT_NAME && account.uid != 0)
            .or_else(|| self.account(|account| account.uid == DEFAULT_UID));
        match account {
            Some(account) => self.user(&account),
            None => User {
                name: "nobody".to_owned(),
                home: NOBODY_HOME.to_owned(),
                make_home: true,
                ..without_account(NOBODY)
            },
        }
    }

    fn user(&self, account: &Account<'_>) -> User {
        let or =
            |text: &str, default: &str| if text.is_empty() { default } else { text }.to_owned();
        User {
            uid: account.uid,
            gid: account.gid,
            groups: self.groups_of(account.name, account.gid),
            name: account.name.to_owned(),
            home: or(account.home, "/"),
            shell: or(account.shell, "/bin/sh"),
            make_home: account.name == DEFAULT_NAME,
        }
    }

    /// The first account for which `wanted` holds. Lines that are none (passwd(5)) are passed over.
    fn account<'a>(&'a self, wanted: impl Fn(&Account<'a>) -> bool) -> Option<Account<'a>> {
        self.passwd
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let account = Account {
                    name: fields.next().filter(|name| !name.is_empty())?,
                    uid: fields.nth(1).and_then(number)?,
                    gid: fields.next().and_then(number)?,
                    home: fields.nth(1).unwrap_or_default(),
                    shell: fields.next().unwrap_or_default(),
                };
                Some(account)
            })
            .find(wanted)
    }

    fn groups_of(&self, name: &str, primary: u32) -> Vec<u32> {
        let mut groups = vec![primary];
        for (_, gid, members) in self.groups() {
            if groups.len() < MAX_GROUPS
                && !groups.contains(&gid)
                && members.split(',').any(|member| member == name)
            {
                groups.push(gid);
            }
        }
        groups
    }

    fn group_number(&self, group: &str) -> Option<u32> {
        self.groups()
            .find(|(name, ..)| *name == group)
            .map(|(_, gid, _)| gid)
            .or_else(|| number(group))
    }

    /// Name, number and members of each group (group(5)).
    fn groups(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let gid = fields.nth(1).and_then(number)?;
            Some((name, gid, fields.next().unwrap_or_default()))
        })
    }
}

fn without_account(uid: u32) -> User {
    User {
        uid,
        gid: uid,
        groups: vec![uid],
        name: uid.to_string(),
        home: "/".to_owned(),
        shell: "/bin/sh".to_owned(),
        make_home: false,
    }
}

fn number(text: &str) -> Option<u32> {
    // `parse` takes a leading `+`, which no account file has.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|id| digits && *id != NO_ID)
}

fn read_bounded(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MAX_ACCOUNT_FILE_BYTES).read_to_end(&mut bytes);
    }
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: "root:x:0:0:root:/root:/bin/bash\n\
                     # a comment\n\
                     broken:x:abc:1::\n\
                     short:x:77\n\
                     sandbox:x:1000:1000::/home/sandbox:/bin/sh\n\
                     ann:x:1001:100::/home/ann:\n\
                     4:x:1004:1004::/home/four:/bin/sh\n"
                .to_owned(),
            group: "root:x:0:\nusers:x:100:\naudio:x:29:ann,sandbox\nvideo:x:44:sandbox\n\
                    annex:x:45:annabel\n"
                .to_owned(),
        }
    }

    #[test]
    fn the_default_is_the_images_unprivileged_user() {
        let user = accounts().resolve(None).unwrap();

        assert_eq!(
            (user.uid, user.gid, user.groups),
            (1000, 1000, vec![1000, 29, 44])
        );
        assert_eq!(
            (user.home.as_str(), user.shell.as_str()),
            ("/home/sandbox", "/bin/sh")
        );
    }

    #[test]
    fn without_that_user_it_is_uid_1000_and_without_that_nobody_with_a_home() {
        let mut some = accounts();
        some.passwd = "debian:x:1000:1000::/home/debian:/bin/bash\n".to_owned();
        let none = Accounts::default();

        assert_eq!(some.resolve(None).unwrap().name, "debian");
        let nobody = none.resolve(None).unwrap();
        assert_eq!(
            (nobody.uid, nobody.home.as_str(), nobody.make_home),
            (65_534, "/home/sandbox", true)
        );
    }

    #[test]
    fn an_account_called_sandbox_with_roots_number_is_not_the_default() {
        let accounts = Accounts {
            passwd: "sandbox:x:0:0::/:/bin/sh\n".to_owned(),
            group: String::new(),
        };

        assert_eq!(accounts.resolve(None).unwrap().uid, 65_534);
    }

    #[test]
    fn users_and_groups_go_by_name_or_number() {
        let accounts = accounts();

        assert_eq!(accounts.resolve(Some("ann")).unwrap().shell, "/bin/sh");
        assert_eq!(accounts.resolve(Some("1001")).unwrap().name, "ann");
        let video = accounts.resolve(Some("ann:video")).unwrap();
        assert_eq!((video.gid, video.groups), (44, vec![44]));
        assert_eq!(accounts.resolve(Some("ann")).unwrap().groups, [100, 29]);
        assert_eq!(accounts.resolve(Some("0:29")).unwrap().gid, 29);
        assert_eq!(accounts.resolve(Some("4321")).unwrap().gid, 4321);
        // A name that looks like a number is a name first, as in chown(1).
        assert_eq!(accounts.resolve(Some("4")).unwrap().uid, 1004);
    }

    #[test]
    fn test_resolve_unknown_names_return_errors_that_name_them() {
        let accounts = accounts();

        assert_eq!(
            accounts.resolve(Some("eve")),
            Err(UserError::NoUser("eve".into()))
        );
        assert_eq!(
            accounts.resolve(Some("broken")),
            Err(UserError::NoUser("broken".into()))
        );
        assert_eq!(
            accounts.resolve(Some("ann:eve")),
            Err(UserError::NoGroup("eve".into()))
        );
        assert_eq!(
            accounts.resolve(Some("")),
            Err(UserError::NoUser(String::new()))
        );
        assert_eq!(
            accounts.resolve(Some("ann:")),
            Err(UserError::NoGroup(String::new()))
        );
        accounts.resolve(Some("4294967295")).unwrap_err();
        accounts.resolve(Some("+0")).unwrap_err();
        accounts.resolve(Some("-1")).unwrap_err();
    }

    proptest! {
        #[test]
        fn any_files_give_a_user_or_an_error(passwd in "[a-c:0-9\n,]{0,80}", group in "[a-c:0-9\n,]{0,80}", spec in "[a-c:0-9]{0,6}") {
            let accounts = Accounts { passwd, group };
            if let Ok(user) = accounts.resolve(Some(&spec)) {
                prop_assert!(user.uid != NO_ID && user.gid != NO_ID && user.groups.len() <= MAX_GROUPS);
            }
            prop_assert!(accounts.resolve(None).is_ok_and(|user| user.uid != 0 || accounts.passwd.contains("1000")));
        }
    }
}
