# Lists the replicas of a model and watches a version until it has ended: a program that knows nothing of
# weightsync but proto/.
#
#   protoc -I proto --plugin=protoc-gen-grpc=/usr/bin/grpc_ruby_plugin --ruby_out=STUBS --grpc_out=STUBS \
#     proto/weightsync/v1/{admin,types}.proto
#   ruby -I STUBS tests/languages/watch.rb ADDRESS models/MODEL VERSION
require 'grpc'
require 'weightsync/v1/admin_services_pb'

address, model, version = ARGV
abort 'usage: watch.rb ADDRESS models/MODEL VERSION' if version.nil?

$stdout.sync = true
admin = Weightsync::V1::AdminService::Stub.new(address, :this_channel_is_insecure)
deadline = Time.now + 60

page = ''
loop do
  answer = admin.list_replicas(
    Weightsync::V1::ListReplicasRequest.new(parent: model, page_size: 1, page_token: page), deadline: deadline
  )
  answer.replicas.each { |r| puts "replica #{r.name} version #{r.version} #{r.state} workers #{r.workers.size}" }
  page = answer.next_page_token
  break if page.empty?
end

begin
  admin.watch_version(
    Weightsync::V1::WatchVersionRequest.new(name: "#{model}/versions/#{version}"), deadline: deadline
  ).each do |v|
    puts "#{v.name} #{v.state} #{v.total_bytes} bytes"
  end
  admin.get_model(Weightsync::V1::GetModelRequest.new(name: 'models/nowhere'), deadline: deadline)
rescue GRPC::BadStatus => e
  # The reason is in a google.rpc.ErrorInfo; Debian's gem has no class for it, and needs none to find it.
  reason = e.metadata['grpc-status-details-bin'].to_s[/[A-Z]{3,}(_[A-Z]+)+/]
  puts "error #{e.code} #{reason}"
end
