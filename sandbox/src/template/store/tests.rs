use super::*;

#[test]
fn what_a_killed_builder_has_left_is_removed_and_no_more() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let path = root.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("memory"), "x").unwrap();
        path
    };
    let (template, living, dead, removed) = (
        folder("t"),
        folder(&format!("{UNFINISHED}a")),
        folder(&format!("{UNFINISHED}b")),
        folder(&format!("{REMOVED}c")),
    );
    let held = lock(&living).unwrap();

    sweep(root.path());

    assert!(template.exists() && living.exists() && !dead.exists() && !removed.exists());
    drop(held);
    // A process that another test is just starting may have a copy of it for a moment.
    drop(lock_soon(&living).unwrap());
    sweep(root.path());
    assert!(template.exists() && !living.exists());
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn what_is_saved_is_its_owners_alone_until_somebody_opens_templates_to_others() {
    let home = tempfile::tempdir().unwrap();
    let data_folder = home.path().join("data");
    for (shelf, name, kept) in [
        (Shelf::Templates, "templates", 0o750),
        (Shelf::Paused, "paused", PRIVATE),
    ] {
        let root = data_folder.join(name);

        shelf.make(&root).unwrap();

        assert_eq!(mode(&root), PRIVATE);
        // What a killed builder of another version has left.
        let left = root.join(format!("{UNFINISHED}a"));
        fs::create_dir(&left).unwrap();
        fs::set_permissions(&left, fs::Permissions::from_mode(0o755)).unwrap();
        let claimed = Staging::claim(left).unwrap();
        assert_eq!(mode(claimed.path()), PRIVATE);
        let unfinished = Unfinished::below(&root, "b", Existing::Stays).unwrap();
        assert_eq!(mode(&unfinished.finish().unwrap()), PRIVATE);

        fs::set_permissions(&root, fs::Permissions::from_mode(0o750)).unwrap();
        shelf.make(&root).unwrap();
        assert_eq!(mode(&root), kept);
    }
}

#[test]
fn a_name_is_taken_from_the_beginning_on_and_free_again_where_nothing_came_of_it() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let first = Unfinished::below(root, "a", Existing::Stays).unwrap();

    let second = Unfinished::below(root, "a", Existing::Stays).unwrap_err();
    let other = Unfinished::below(root, "b", Existing::Stays).unwrap();

    assert!(matches!(second, TemplateError::Busy { .. }), "{second:?}");
    drop(first);
    let first = Unfinished::below(root, "a", Existing::Stays).unwrap();
    fs::write(first.path().join("memory"), "x").unwrap();
    let folder = first.finish().unwrap();
    let second = Unfinished::below(root, "a", Existing::Stays).unwrap_err();
    assert!(matches!(second, TemplateError::Exists { .. }), "{second:?}");
    drop(other);
    assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    assert_eq!(fs::read(folder.join("memory")).unwrap(), b"x");
}

#[test]
fn of_many_that_make_one_name_one_does_and_the_others_learn_it_before() {
    let root = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let name = format!("n{round}");
        let made: usize = thread::scope(|scope| {
            let makers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let unfinished = Unfinished::below(root.path(), &name, Existing::Stays)?;
                        fs::write(unfinished.path().join("memory"), "x").unwrap();
                        // Once the name is had, it is not lost at the end.
                        Ok(unfinished.finish().unwrap())
                    })
                })
                .collect();
            makers
                .into_iter()
                .map(|maker| match maker.join().unwrap() {
                    Ok(_) => 1,
                    Err(TemplateError::Exists { .. } | TemplateError::Busy { .. }) => 0,
                    Err(error) => panic!("{error:?}"),
                })
                .sum()
        });
        assert_eq!(made, 1);
    }
}

#[test]
fn who_sweeps_takes_nothing_from_who_begins() {
    let root = tempfile::tempdir().unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..250 {
                    let staging = Staging::nameless_below(root.path()).unwrap();
                    fs::write(staging.path().join("memory"), "x").unwrap();
                }
            });
        }
    });
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn what_is_replaced_stays_until_the_new_one_is_whole_and_then_goes() {
    type Replace = fn(&Path, &Path) -> io::Result<()>;
    for with in [replace as Replace, replace_in_two_steps] {
        let root = tempfile::tempdir().unwrap();
        let (new, target) = (root.path().join("new"), root.path().join("a"));
        for (folder, content) in [(&new, "new"), (&target, "old")] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("memory"), content).unwrap();
        }

        with(&new, &target).unwrap();

        assert_eq!(fs::read(target.join("memory")).unwrap(), b"new");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        // What can't be named has taken nothing away.
        with(&new, &target).unwrap_err();
        assert_eq!(fs::read(target.join("memory")).unwrap(), b"new");
    }
}

#[test]
fn a_build_that_comes_to_nothing_leaves_what_it_was_to_replace() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let build = |content: &str| {
        let unfinished = Unfinished::below(root, "a", Existing::IsReplaced).unwrap();
        fs::write(unfinished.path().join("memory"), content).unwrap();
        unfinished
    };
    let memory = || fs::read_to_string(root.join("a/memory")).unwrap();
    build("first").finish().unwrap();

    drop(build("failed"));
    assert_eq!(memory(), "first");

    let second = build("second");
    assert_eq!(memory(), "first");
    second.finish().unwrap();
    assert_eq!(memory(), "second");
    assert_eq!(fs::read_dir(root).unwrap().count(), 1);
}

#[test]
fn what_is_left_under_a_name_is_not_in_who_takes_it() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join(format!("{UNFINISHED}a"));
    fs::create_dir_all(path.join("rehearsal")).unwrap();
    fs::write(path.join("memory"), "x").unwrap();

    let staging = Staging::claim(path.clone()).unwrap();

    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    drop(staging);
    assert!(!path.exists());
}

#[test]
fn a_lock_is_of_the_folder_that_has_the_name() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a");
    fs::create_dir(&path).unwrap();
    let held = lock(&path).unwrap();
    assert_eq!(lock(&path).unwrap_err().kind(), ErrorKind::WouldBlock);

    set_aside(&path).unwrap();

    assert_eq!(lock(&path).unwrap_err().kind(), ErrorKind::NotFound);
    fs::create_dir(&path).unwrap();
    assert!(!is_current(&held, &path));
    lock(&path).unwrap();
}

#[test]
fn names_that_could_lead_elsewhere_are_refused() {
    for name in [
        "",
        ".",
        "..",
        ".a",
        "a/b",
        "/a",
        "-a",
        "a b",
        "ä",
        "a\0",
        &"a".repeat(65),
    ] {
        assert!(
            matches!(folder(name), Err(TemplateError::Name { .. })),
            "{name:?}"
        );
    }
    for name in ["a", "default", "numpy-1.2_x", "0", &"a".repeat(64)] {
        assert!(folder(name).unwrap().ends_with(name));
    }
}
