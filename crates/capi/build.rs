//! Gives the shared library its name for the dynamic linker, so that programs which were linked with it find each later
//! version of the same ABI, and exports no functions of dependencies.

fn main() {
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libiec.so.1");
        println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
