#!/usr/bin/env python3
"""Makes the torch of a virtual environment importable where there is no CUDA.

PyPI has torch for this kind of machine only as a CUDA build, whose libraries are several GB more. On a
CPU it calls nothing in them, but the loader wants them: this writes, beside torch's own, libraries of
the missing names that have the symbols torch asks for, each of which answers that there is no driver.

Usage: torch_without_cuda.py SITE_PACKAGES
"""

import pathlib
import re
import subprocess
import sys
import tempfile

# cudaErrorInsufficientDriver; no library of CUDA takes it for a success.
NO_DRIVER = 35


def needed_of(library):
    out = subprocess.run(["readelf", "-dW", library], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", out)


def undefined_of(library):
    """(symbol, version or "") that the library wants from others."""
    out = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True
    ).stdout
    for line in out.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[6] == "UND" and fields[4] == "GLOBAL":
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@")


def defined_of(library):
    out = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines() if line}


def versions_of(library):
    """Symbol version -> the library that it is wanted from."""
    out = subprocess.run(["readelf", "-VW", library], check=True, capture_output=True, text=True).stdout
    found, file = {}, ""
    for line in out.splitlines():
        match = re.search(r"File: (\S+)", line)
        if match:
            file = match.group(1)
        match = re.search(r"Name: (\S+)\s+Flags", line)
        if match and file:
            found[match.group(1)] = file
    return found


def write_stub(path, symbols):
    """`symbols`: version -> names."""
    code = ['.text\n.section .rodata\n.Lno: .asciz "there is no CUDA on this machine"\n.text']
    script = []
    for version, names in sorted(symbols.items()):
        for name in sorted(names):
            answer = (
                "lea .Lno(%rip), %rax" if re.search(r"(String|Name|_error|Version)$", name) and "Get" in name
                else f"mov ${NO_DRIVER}, %eax"
            )
            code.append(f".globl {name}\n.type {name}, @function\n{name}: {answer}\nret")
        if version:
            script.append(f"{version} {{ global: {'; '.join(sorted(names))}; }};")
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "stub.s")
        source.write_text("\n".join(code) + '\n.section .note.GNU-stack,"",@progbits\n')
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", path, source]
        if script:
            versions = pathlib.Path(scratch, "stub.map")
            versions.write_text("\n".join(script) + "\n")
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(command, check=True)


def main(site_packages):
    folder = pathlib.Path(site_packages, "torch", "lib")
    libraries = sorted(folder.glob("*.so*"))
    known = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    known = {line.split()[0] for line in known.splitlines()[1:] if line.strip()}
    have = {library.name for library in libraries}
    needed = {name for library in libraries for name in needed_of(library)}
    missing = sorted(needed - have - {n for n in known if not n.startswith(("libcu", "libnv", "libnccl"))})
    if not missing:
        return
    defined = set().union(*(defined_of(library) for library in libraries))
    stubs = {name: {} for name in missing}
    for library in libraries:
        versions = versions_of(library)
        wanted = set(needed_of(library))
        for name, version in undefined_of(library):
            if version:
                if versions.get(version) in stubs:
                    stubs[versions[version]].setdefault(version, set()).add(name)
            elif name not in defined and wanted & set(missing):
                # Anybody may have it.
                stubs[sorted(wanted & set(missing))[0]].setdefault("", set()).add(name)
    for name, symbols in stubs.items():
        write_stub(folder / name, symbols)
    print(f"torch_without_cuda.py: stands in for {', '.join(missing)}")


if __name__ == "__main__":
    main(sys.argv[1])
