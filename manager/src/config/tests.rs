use std::path::Path;

use clap::{Args as _, FromArgMatches as _};

use super::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn machine() -> Machine {
    Machine {
        memory_available_bytes: Some(64 * GIB),
        socket_path: PathBuf::from("/run/user/7/orbitkv/manager.sock"),
    }
}

fn command() -> clap::Command {
    ServeArgs::augment_args(clap::Command::new("serve"))
}

fn args(flags: &[&str]) -> ServeArgs {
    let matches = command()
        .try_get_matches_from(std::iter::once(&"serve").chain(flags))
        .expect("flags that clap takes");
    ServeArgs::from_arg_matches(&matches).expect("every field has a default")
}

fn resolve(file: &str, flags: &[&str]) -> Result<Config, ConfigError> {
    let mut words = Words::from_file(Path::new("etc/orbit.toml"), file)?;
    words.override_with(&args(flags));
    Config::resolve(&words, &machine())
}

fn refused(file: &str, flags: &[&str]) -> String {
    let error = resolve(file, flags).expect_err("a refusal");
    assert!(!error.is_environment(), "{error}");
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

fn holds(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing from {message:?}");
    }
}

#[test]
fn defaults_fit_a_laptop() {
    let config = resolve("", &[]).unwrap();
    assert_eq!(config.dram.capacity_bytes, GIB);
    assert_eq!(config.ssd, None);
    assert_eq!(config.budget.query_bytes, GIB / 2);
    assert_eq!(config.budget.session_bytes, GIB / 2);
    assert_eq!(config.budget.speculative_bytes, GIB / 8);
    assert_eq!(config.limits.sessions, 64);
    assert_eq!(config.limits.bad_requests, 16);
    assert_eq!(config.http.address, None);
    assert!(config.socket.path_is_default);

    let small = Machine { memory_available_bytes: Some(700 * MIB), ..machine() };
    let config = Config::resolve(&Words::default(), &small).unwrap();
    // A quarter of 700 MiB, rounded down to whole huge pages.
    assert_eq!(config.dram.capacity_bytes, 174 * MIB);
    let unknown = Machine { memory_available_bytes: None, ..machine() };
    assert_eq!(Config::resolve(&Words::default(), &unknown).unwrap().dram.capacity_bytes, GIB);
}

#[test]
fn flags_win_over_the_file_field_by_field() {
    let file = "[dram]\ncapacity = \"8GiB\"\nhuge_pages = \"off\"\n[ssd]\npaths = [\"a\", \"b\"]\n";
    let config = resolve(file, &["--dram", "2 GiB", "--ssd", "c", "--spill=reuse"]).unwrap();
    assert_eq!(config.dram.capacity_bytes, 2 * GIB);
    assert_eq!(config.dram.huge_pages, HugePages::Off);
    let ssd = config.ssd.unwrap();
    assert_eq!(ssd.paths, [PathBuf::from("c")]);
    assert_eq!(ssd.spill, SpillPolicy::Reuse);
}

#[test]
fn a_misspelt_key_names_file_line_nearest_and_accepted() {
    let message = refused("[dram]\n\ncapcity = 1\n", &[]);
    holds(
        &message,
        &[
            "etc/orbit.toml:3:",
            "dram.capcity",
            "did you mean capacity",
            "accepted: capacity, huge_pages, replacement",
        ],
    );
}

#[test]
fn a_misspelt_table_names_the_tables() {
    let message = refused("[drams]\ncapacity = 1\n", &[]);
    holds(&message, &["etc/orbit.toml:1:", "drams", "did you mean dram", "socket, dram, ssd"]);
}

#[test]
fn a_key_in_the_wrong_table_names_its_home() {
    let message = refused("[dram]\nspill = \"all\"\n", &[]);
    holds(&message, &["etc/orbit.toml:2:", "dram.spill", "belongs into [ssd]", "all, or reuse"]);
    let message = refused("huge_pages = \"off\"\n", &[]);
    holds(&message, &["etc/orbit.toml:1:", "huge_pages", "belongs into [dram]"]);
    // Two tables have it.
    let message = refused("[budget]\ncapacity = 1\n", &[]);
    holds(&message, &["[dram] or [ssd]"]);
    // A slip within the table is not taken for a stray.
    let message = refused("[ssd]\npath = \"x\"\n", &[]);
    holds(&message, &["did you mean paths"]);
}

#[test]
fn a_wrong_type_names_what_is_taken() {
    for (file, expected, found) in [
        ("[dram]\ncapacity = true\n", "a string such as \"4GiB\"", "a boolean"),
        ("[dram]\ncapacity = 1.5\n", "a string such as \"4GiB\"", "a float"),
        ("[time]\nlease_ttl = 5\n", "a string such as \"500ms\"", "an integer"),
        ("[limits]\nsessions = \"64\"\n", "an integer", "a string"),
        ("[ssd]\npaths = \"x\"\n", "an array of strings", "a string"),
        ("[ssd]\npaths = [1]\n", "an array of strings", "an integer"),
        ("[socket]\nallow_uids = [\"1\"]\n", "an array of integers", "a string"),
        ("[socket]\npath = []\n", "a string", "an array"),
        ("[http]\noptional = \"yes\"\n", "true or false", "a string"),
        ("[http]\naddress = 80\n", "a string", "an integer"),
        ("[ssd]\ndirect = true\n", "a string", "a boolean"),
        ("dram = 5\n", "a table", "an integer"),
        ("[dram.capacity]\nx = 1\n", "a string such as \"4GiB\"", "a table"),
    ] {
        let message = refused(file, &[]);
        holds(&message, &["etc/orbit.toml:", expected, found]);
    }
}

#[test]
fn syntax_errors_are_one_line_with_their_place() {
    for file in ["[dram\n", "a = \n", "[dram]\ncapacity = 1\ncapacity = 2\n", "\u{0}"] {
        holds(&refused(file, &[]), &["etc/orbit.toml:", "not TOML"]);
    }
    holds(&refused("[dram]\ncapacity = 1\ncapacity = 2\n", &[]), &["etc/orbit.toml:3:"]);
}

#[test]
fn every_size_of_the_operator_has_a_documented_result() {
    let dram = |text: &str| resolve("", &["--dram", text]).map(|c| c.dram.capacity_bytes);
    assert_eq!(dram("10GB").unwrap(), 10_000_000_000 / (2 * MIB) * (2 * MIB));
    for text in ["10GiB", "10gib", "10 GiB", "10737418240"] {
        assert_eq!(dram(text).unwrap(), 10 * GIB, "{text}");
    }
    for text in ["0", "1", "10", "2097151", "17TiB"] {
        let message = refused("", &["--dram", text]);
        holds(&message, &["--dram", "bytes", "out of range", "2MiB to 16TiB"]);
    }
    for text in ["-1", "10G", "1e30", "", "ten"] {
        let message = refused("", &["--dram", text]);
        holds(&message, &["--dram", &format!("{text:?}"), "2MiB to 16TiB", "KiB, MiB, GiB"]);
    }
    holds(&refused("[dram]\ncapacity = -1\n", &[]), &["dram.capacity", "-1 bytes"]);
    let tier = |text: &str| resolve("", &["--ssd", "x", "--ssd-capacity", text]);
    assert_eq!(tier("0").unwrap().ssd, None);
    assert_eq!(tier("3MiB").unwrap().ssd.unwrap().capacity_bytes, 3 * MIB);
    holds(&refused("", &["--ssd", "x", "--ssd-capacity", "4KiB"]), &["--ssd-capacity", "0 (tier"]);
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    holds(&refused("", &["--dram", "1GiB", "--query-budget", "2GiB"]), &["to dram.capacity"]);
    holds(
        &refused("[budget]\nquery = \"64MiB\"\nsession = \"65MiB\"\n", &[]),
        &["etc/orbit.toml:3:", "budget.session", "to budget.query"],
    );
    holds(&refused("", &["--ssd-capacity", "1GiB"]), &["--ssd-capacity", "--ssd PATH"]);
    holds(&refused("", &["--ssd", "x", "--ssd", "x"]), &["--ssd", "twice"]);
    holds(&refused("[limits]\nring_capacity = 100\n", &[]), &["a power of two"]);
    holds(&refused("[limits]\nsessions = 128\n", &[]), &["128", "1 to 127"]);
}

#[test]
fn choices_name_their_words() {
    holds(
        &refused("", &["--huge-pages", "requre"]),
        &["--huge-pages", "\"requre\"", "did you mean require", "accepted: require, prefer, off"],
    );
    holds(&refused("[reactor]\nwait = \"spin\"\n", &[]), &["accepted: adaptive, dedicated"]);
    holds(&refused("", &["--device", "gpu"]), &["auto, host, cuda"]);
    holds(&refused("", &["--allow-uid", "root"]), &["--allow-uid", "\"root\"", "user ids"]);
    holds(&refused("", &["--allow-gid", "4294967295"]), &["--allow-gid", "out of range"]);
    holds(&refused("", &["--http", "localhost"]), &["--http", "IP:PORT"]);
}

#[test]
fn http_addresses() {
    let address = |text| resolve("", &["--http", text]).unwrap().http.address;
    assert_eq!(address("9464"), Some("127.0.0.1:9464".parse().unwrap()));
    assert_eq!(address("[::1]:0"), Some("[::1]:0".parse().unwrap()));
    assert_eq!(address("off"), None);
}

#[test]
fn a_socket_path_that_no_client_could_name_is_refused() {
    let long = format!("/{}", "x".repeat(SOCKET_PATH_BYTES_MAX));
    holds(&refused("", &["--socket", &long]), &["--socket", "104 bytes", "103 bytes"]);
    assert!(resolve("", &["--socket", &long[..SOCKET_PATH_BYTES_MAX]]).is_ok());
    holds(&refused("[socket]\npath = \"\"\n", &[]), &["socket.path", "at most 103 bytes"]);
    holds(&refused("[socket]\npath = \"a\\u0000b\"\n", &[]), &["socket.path"]);
    let deep = Machine { socket_path: PathBuf::from(&long), ..machine() };
    let message = Config::resolve(&Words::default(), &deep).unwrap_err().to_string();
    holds(&message, &["default of socket.path", "104 bytes"]);
}

#[test]
fn what_is_printed_resolves_to_the_same_and_shows_every_limit() {
    for flags in [
        &[][..],
        &[
            "--dram",
            "3GiB",
            "--ssd",
            "a b",
            "--ssd",
            "ü\"\\",
            "--ssd-capacity",
            "7GiB",
            "--http",
            "127.0.0.1:0",
            "--http-optional",
            "--allow-gid",
            "12",
            "--lease-ttl",
            "1500ms",
            "--ssd-direct",
            "off",
            "--wait",
            "dedicated",
            "--query-budget",
            "1GiB",
        ],
    ] {
        let config = resolve("", flags).unwrap();
        let printed = config.to_string();
        let mut again = resolve(&printed, &[]).unwrap();
        again.socket.path_is_default = config.socket.path_is_default;
        assert_eq!(again, config, "{printed}");
        for (name, value) in FIXED_LIMITS {
            assert!(printed.contains(&format!("# {name} = {value}")), "{name}");
        }
        for row in field::FIELDS {
            assert!(printed.contains(&format!("{} ", row.name)), "{row:?}");
            assert!(printed.contains(row.range) && printed.contains(row.cost), "{row:?}");
        }
    }
}

#[test]
fn every_flag_of_the_table_exists_and_reaches_its_field() {
    let command = command();
    for row in field::FIELDS {
        let Some(flag) = row.flag else { continue };
        let arg = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(flag.trim_start_matches("--")))
            .unwrap_or_else(|| panic!("{flag} is no flag of serve"));
        let typed = if arg.get_action().takes_values() { vec![flag, "7"] } else { vec![flag] };
        let mut words = Words::default();
        words.override_with(&args(&typed));
        assert_eq!(words.get(row.key).map(|word| &word.place), Some(&Place::Flag(flag)));
    }
}

#[test]
fn a_hidden_flag_is_not_among_the_accepted_ones() {
    let command = command().arg(clap::Arg::new("secret").long("secret").hide(true));
    let error = command.clone().try_get_matches_from(["serve", "--bogus"]).unwrap_err();
    let line = usage_line(&error, &command);
    assert!(line.contains("--dram") && !line.contains("secret"), "{line}");
}

#[test]
fn usage_errors_of_the_flags_are_one_line() {
    let line = |flags: &[&str]| {
        let error = command()
            .try_get_matches_from(std::iter::once(&"serve").chain(flags))
            .expect_err("a usage error");
        let line = usage_line(&error, &command());
        assert!(!line.contains('\n') && !line.is_empty(), "{line:?}");
        line
    };
    holds(&line(&["--drma", "1GiB"]), &["--drma", "did you mean --dram", "--ssd-capacity"]);
    holds(&line(&["--dram"]), &["--dram", "missing", "2MiB to 16TiB"]);
    holds(&line(&["--http-optional=yes"]), &["--http-optional"]);
    holds(&line(&["stray"]), &["stray"]);
    holds(&line(&["--dram", "1GiB", "--dram", "2GiB"]), &["--dram"]);
}
